"""A slide encoder of another package: one file and an entry point, in Python and in the shell."""

from importlib import metadata
from pathlib import Path

import h5py
import numpy as np
import pytest
from tests.support.other_package import in_python, install

from thinsection.errors import InvalidInputError
from thinsection.pool import load_slide_encoder
from thinsection.pool.encoder import SLIDE_ENCODERS

pytestmark = pytest.mark.check  # processes with another package

TOY = '''
import numpy as np
from thinsection.pool import SlideEncoder


class MedianSlideEncoder(SlideEncoder):
    """The median of each channel over tiles."""

    name = "median"

    def encode(self, tile_embeddings, coords_l0, *, tile_px_l0):
        return np.median(tile_embeddings, axis=0).astype(np.float32)
'''
LOAD = """
import numpy as np
from thinsection.pool import load_slide_encoder
toy = load_slide_encoder("median", device="cpu")
print(toy.label("uni"), toy.encode(np.float32([[0], [1], [5]]), None, tile_px_l0=1))
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which a package with a slide encoder is installed."""
    return install(
        tmp_path, "toy_pool", TOY, "slide_encoders", median="MedianSlideEncoder"
    )


def output(env: dict[str, str], *arguments: object) -> str:
    done = in_python(env, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_loads_by_name_and_pools_from_the_shell(
    installed: dict[str, str], tmp_path: Path
) -> None:
    assert output(installed, "-c", LOAD).split() == ["median-uni", "[1.]"]
    listed = output(installed, "-m", "thinsection", "models").splitlines()
    assert "slide encoder\tmedian\tThe median of each channel over tiles." in listed
    features = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
    source = tmp_path / "features" / "a.h5"
    source.parent.mkdir()
    with h5py.File(source, "w") as file:
        file["features"] = features
        file["coords"] = np.arange(14).reshape(7, 2) * 256
        file["coords"].attrs["patch_size_level0"] = 256
    command = (
        "-m",
        "thinsection",
        "aggregate",
        source.parent,
        "--slide-encoder",
        "median",
    )
    output(installed, *command, "--device", "cpu")
    (written,) = set(tmp_path.rglob("*.h5")) - {source}
    with h5py.File(written) as file:
        (found,) = (d[...] for d in file.values() if isinstance(d, h5py.Dataset))
        np.testing.assert_array_equal(found.squeeze(), np.median(features, axis=0))


def test_what_is_no_slide_encoder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("odd", "builtins:dict", SLIDE_ENCODERS.group)
    monkeypatch.setitem(SLIDE_ENCODERS._points, "odd", point)
    with pytest.raises(
        InvalidInputError, match="'odd' must be a subclass of SlideEncoder, got"
    ):
        load_slide_encoder("odd", device="cpu")
