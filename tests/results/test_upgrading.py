"""A folder of an earlier version: `verify` says so, and a run makes again what must be."""

import shutil
from pathlib import Path

from tests.support.shell import thinsection

import thinsection as ts
from thinsection.files.atomic import read_json, write_json
from thinsection.results.records import read_records, versions_of
from thinsection.testing.synthetic import write_he_slide


def test_verify_names_versions_and_ledgers_of_another_form_and_a_run_repairs_them(
    tmp_path: Path,
) -> None:
    slides = tmp_path / "slides"
    slides.mkdir()
    for seed, name in enumerate(("a", "b")):
        write_he_slide(slides / f"{name}.svs", (700, 500), seed=seed)
    out = tmp_path / "out"
    settings = {"out": out, "until": "tiles", "tile_px": 128}
    ts.run([slides], **settings)
    record = out / "records"
    for path in record.glob("*/run.json"):
        write_json(path, read_json(path) | {"thinsection_version": "0.1.0"})
    ledger = out / "slides" / "b" / "slide.json"
    write_json(ledger, read_json(ledger) | {"format": 1})
    before = (out / "slides" / "a" / "slide.json").read_bytes()
    shutil.copytree(out, tmp_path / "kept")

    ended = thinsection("verify", out)
    assert ended.returncode == 1
    assert "slides/b/slide.json: slide.json is damaged: format must be 2, got 1" in (
        ended.stdout
    )
    assert f"written by Thinsection 0.1.0; this is {ts.__version__}\n" in ended.stdout

    summary = ts.run([slides], **settings)
    assert (summary.counts["skipped"], summary.counts["done"]) == (1, 1)
    assert (out / "slides" / "a" / "slide.json").read_bytes() == before
    ended = thinsection("verify", out)
    assert ended.returncode == 0
    assert f"written by Thinsection 0.1.0 and {ts.__version__}; this is" in ended.stdout
    assert versions_of(read_records(out)) == ("0.1.0", ts.__version__)


def test_a_folder_without_records_has_no_versions(tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    assert versions_of(read_records(tmp_path)) == ()
    ended = thinsection("verify", tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "0 checksums, 0 damaged\n")
