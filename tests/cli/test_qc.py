"""`thinsection qc` from slides to a contact sheet, its exit codes, and its errors in one line."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.shell import Ended, thinsection

from thinsection.qc import load_pipeline
from thinsection.testing.synthetic import write_he_slide


def run(*arguments: str, cache: Path) -> Ended:
    return thinsection("qc", *arguments, XDG_CACHE_HOME=str(cache))


def test_one_good_slide_and_one_bad_end_with_code_3_and_all_the_files(
    tmp_path: Path,
) -> None:
    slides, out = tmp_path / "slides", tmp_path / "out"
    slides.mkdir()
    write_he_slide(slides / "good.svs", (2400, 1800))
    (slides / "bad.svs").write_text("no slide")
    flags = (
        "--qc",
        "histoqc-light",
        "--write",
        "histoqc",
        "--qc-fail",
        "pixels_to_use<1e9",
    )
    done = run(str(slides), "--out", str(out), *flags, cache=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "bad: failed (open): no reader opens 'bad.svs'" in done.stdout
    assert "good: fails pixels_to_use<1e+09" in done.stdout
    assert "1 of 2 slides done" in done.stdout
    tables = ("qc_histoqc-light.csv", "qc_histoqc-light.html", "results.tsv")
    for name in (
        *tables,
        "slides/good/qc_histoqc-light/qc.zip",
        "good.svs/good.svs_thumb.png",
    ):
        assert (out / name).is_file(), name
    (slides / "bad.svs").unlink()
    again = run(str(slides), "--out", str(out), "--qc", "histoqc-light", cache=tmp_path)
    # the slide is tiny
    assert again.returncode == 3
    assert (
        "good: quality control advises to exclude it: little usable tissue"
        in again.stdout
    )
    assert (
        "1 slide skipped: an earlier run completed them with the same" in again.stdout
    )


def test_a_histoqc_config_is_written_as_toml_and_an_unknown_key_is_one_line(
    tmp_path: Path,
) -> None:
    ini, toml = tmp_path / "config.ini", tmp_path / "p.toml"
    text = "[pipeline]\nsteps= BasicModule.finalProcessingSpur\n[BasicModule.finalProcessingSpur]\n"
    ini.write_text(text + "disk_radius: 7\n")
    flags = ("--from-histoqc", str(ini), "--write-pipeline", str(toml))
    assert run(*flags, cache=tmp_path).returncode == 0
    check: Any = load_pipeline(toml).checks[0]
    assert check.radius == "7 px"
    ini.write_text(text + "disc_radius: 7\n")
    failed = run(*flags, cache=tmp_path)
    assert failed.returncode == 2
    assert "unknown key 'disc_radius'" in failed.stderr.replace("\n", " ")
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    "flag", [("--write", "xml"), ("--qc-fail", "x"), ("--workers", "-1")]
)
def test_a_wrong_flag_is_refused_before_any_work(
    flag: tuple[str, str], tmp_path: Path
) -> None:
    done = run(str(tmp_path / "none.svs"), *flag, cache=tmp_path)
    assert done.returncode == 2
    assert "must" in done.stderr
