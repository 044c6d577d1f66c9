"""Formats beside our own: names, packages, and one that another package brings."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.other_package import in_shell, install

from thinsection.config import from_mapping
from thinsection.errors import ConfigError
from thinsection.registry import Entry
from thinsection.results.folder import open_results
from thinsection.stages.config import OutputConfig, RunConfig
from thinsection.stages.formats import FORMATS

TOY_FORMAT = '''
import numpy as np


def write_npz(table, path):
    """NumPy's own archive."""
    with path.open("wb") as file:
        np.savez(file, coords=table.coords_l0, features=table.tile_embeddings)


write_npz.suffixes = (".npz",)
'''


@pytest.fixture
def toy(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which a package with a format is installed."""
    return install(tmp_path, "toy_format", TOY_FORMAT, "formats", npz="write_npz")


def test_a_format_of_another_package_is_written_from_the_shell(
    tmp_path: Path, he_slide: Path, toy: dict[str, str]
) -> None:
    flags = [
        "--until",
        "embeddings",
        "--out",
        tmp_path / "out",
        "--no-pretrained",
        "--tile-px",
        512,
    ]
    done = in_shell(toy, "run", he_slide, "--write", "npz", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "out").glob("512px_0.5mpp/npz_*/he.npz")
    stored = open_results(tmp_path / "out").tile_embeddings("he")
    with np.load(path) as found:
        np.testing.assert_array_equal(found["features"], stored.features)
        np.testing.assert_array_equal(found["coords"], stored.coords_l0)


def test_an_unknown_format_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="'parqet'; did you mean 'parquet'"):
        from_mapping(RunConfig, {"output": {"write": ["parqet"]}})


def test_every_format_says_what_it_is_and_what_it_needs() -> None:
    assert set(FORMATS.names()) >= {"tsv", "parquet", "zarr"}
    for entry in FORMATS:
        assert isinstance(entry, Entry)
        assert entry.help and entry.suffixes
    assert OutputConfig().write == ()
