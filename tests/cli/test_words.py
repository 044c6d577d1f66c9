"""Words of other tools: flags and names of encoders; said where something is converted."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.encode import encoder_spec
from thinsection.stages.config import AggregateConfig, EncodeConfig
from thinsection.testing.synthetic import write_he_slide


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("uni_v1", "uni"),
        ("uni_v2", "uni2_h"),
        ("UNI2", "uni2_h"),
        ("hoptimus0", "h_optimus_0"),
        ("h-optimus-0", "h_optimus_0"),
        ("conch1_5", "conch_v15"),
        ("virchow-full", "virchow"),
        ("virchow", "virchow"),
        ("timm:resnet18", "timm:resnet18"),
    ],
)
def test_encoders_have_the_names_of_other_tools_too(theirs: str, ours: str) -> None:
    assert EncodeConfig(encoders=(theirs,)).encoders == (ours,)
    if ":" not in theirs:
        assert encoder_spec(theirs).name == ours


@pytest.mark.parametrize("name", ["gigapath_slide", "gigapath-slide", "gigapath"])
def test_slide_encoders_have_other_names_too(name: str) -> None:
    assert AggregateConfig(slide_encoders=(name,)).slide_encoders == ("gigapath",)


def laid(folder: Path, *flags: str) -> tuple[int, str, list[str]]:
    """Exit code, what was said, and the grids of `run --until tiles` with these flags."""
    if not (folder / "s.svs").exists():
        write_he_slide(folder / "s.svs", (900, 700), seed=7)
    arguments = ["run", str(folder / "s.svs"), "--until", "tiles", *flags]
    arguments += ["--out", str(folder / "out")]
    result = CliRunner().invoke(build_app(arguments), arguments)
    said = f"{result.output}{result.exception or ''}"
    return result.exit_code, said, [p.parent.name for p in folder.glob("out/*/tiles")]


def test_a_magnification_is_said_as_a_resolution(tmp_path: Path) -> None:
    code, said, grids = laid(tmp_path, "--mag", "10x", "--patch-size", "64")
    assert (code, grids) == (0, ["64px_1mpp"])
    assert "--mag 10x sets --tile-mpp 1 (µm/px)" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mag", "big"), "mag must be a magnification such as 20, got 'big'"),
        (
            ("--mag", "20", "--tile-mpp", "0.5"),
            "--mag must not be combined with --tile-mpp, got 0.5",
        ),
    ],
)
def test_a_wrong_magnification_is_refused(
    tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    code, said, grids = laid(tmp_path, *flags)
    assert (code != 0, grids) == (True, [])
    assert message in said
