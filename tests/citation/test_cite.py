"""What `thinsection cite` says of a folder is what its files hold, and no more."""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from tests.support.shell import thinsection

import thinsection as ts
from thinsection.citation import Citation, cite
from thinsection.citation.bibtex import known_references, parse_bibtex
from thinsection.errors import StoreError
from thinsection.exchange.peer_export import export_peer
from thinsection.exchange.peer_import import import_peer
from thinsection.files.atomic import read_json, write_json
from thinsection.results.folder import open_results

from .conftest import FINE


def rows_of(folder: Path) -> dict[str, int]:
    """Rows of each file in a folder of a grid, by slide."""
    counts = {}
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            counts[path.stem] = len(file["coords"])
    return counts


def keys_of(citation: Citation) -> set[str]:
    return {one.key for one in citation.references}


def test_it_prints_itself_in_a_line_and_can_be_pickled(two_encoders: Path) -> None:
    citation = cite(two_encoders)
    number = len(citation.references)
    assert re.fullmatch(
        rf"Citation\(\d+ methods, {number} references, \d+ unknown\)", repr(citation)
    )
    assert pickle.loads(pickle.dumps(citation)) == citation  # noqa: S301


def test_numbers_of_both_grids_are_those_of_the_files(two_encoders: Path) -> None:
    text = cite(two_encoders).text
    fine = rows_of(two_encoders / FINE / "tiles")
    (grid,) = [path.name for path in two_encoders.glob("96px_2mpp*")]
    coarse = rows_of(two_encoders / grid / "tiles")
    assert set(fine) == {"a", "b_1", "c"} and set(coarse) == {"a", "b_1"}
    assert (
        f"The grid {FINE} has {sum(fine.values())} tiles of 3 slides: 128 x 128 px at 0.5 µm/px, "
        "no overlap, at least 50 % tissue." in text
    )
    assert (
        f"The grid {grid} has {sum(coarse.values())} tiles of 2 slides: 96 x 96 px at 2 µm/px, "
        "25 % overlap, at least 25 % tissue." in text
    )
    assert "The cohort has 4 whole-slide images of 3 patients." in text
    assert f"made with {ts.__version__}" in text


def test_a_slide_that_failed_is_named_with_the_reason(two_encoders: Path) -> None:
    (row,) = open_results(two_encoders).failures().values()
    line = f"1 slide (broken) was left out: {row}."
    assert " ".join(line.split()) in cite(two_encoders).paragraph


def test_both_encoders_are_cited_with_weights_and_precision(two_encoders: Path) -> None:
    citation = cite(two_encoders)
    for path in sorted(two_encoders.glob("*/features_*")):
        with h5py.File(path / "a.h5") as file:
            facts = {**file.attrs, **file["features"].attrs}
            dim = file["features"].shape[1]
        sentence = next(
            one
            for one in citation.account.sentences
            if one.startswith(f"Tiles of the grid {path.parent.name} were embedded by ")
        )
        assert f"embedded by {facts['encoder']} [@" in sentence
        assert f"{dim} dimensions" in sentence and str(facts["precision"]) in sentence
        assert str(facts["weights_hash"])[:12] in sentence
        is_random = "seed0" in path.name
        assert ("random weights (seed 0)" in sentence) == is_random
        assert ("normalised before by Reinhard's method" in sentence) == is_random
    assert {"tan2019efficientnet", "kang2023lunit", "reinhard2001color"} <= keys_of(
        citation
    )
    assert "macenko2009normalizing" not in keys_of(citation)


def test_readers_are_those_of_each_grid_and_not_of_the_last_command(
    two_encoders: Path,
) -> None:
    citation = cite(two_encoders)
    (grid,) = [path.name for path in two_encoders.glob("96px_2mpp*")]
    assert (
        f"For the grid {grid}, slides were read by the reader openslide (2 slides)"
        in citation.text
    )
    assert (
        f"For the grid {FINE}, slides were read by the reader tiff (1 slide)"
        in citation.text
    )
    assert f"the reader that opened a, b_1 for the grid {FINE}" in citation.unknown[0]
    assert "goode2013openslide" in keys_of(citation)


def test_nothing_is_cited_that_was_not_used(two_encoders: Path, tmp_path: Path) -> None:
    for entry in (two_encoders / "slides").iterdir():
        if entry.name != "c":
            continue
        shutil.copytree(entry, tmp_path / "one" / "slides" / entry.name)
    for path in two_encoders.glob(f"{FINE}/*/c.h5"):
        copied = tmp_path / "one" / path.relative_to(two_encoders)
        copied.parent.mkdir(parents=True)
        shutil.copy(path, copied)
    citation = cite(tmp_path / "one")
    assert keys_of(citation) == {"tan2019efficientnet"}
    assert (
        "versions and settings: the folder has no records of commands"
        in citation.unknown
    )
    assert (
        f"tissue fraction and filters of the grid {FINE}: no record has them"
        in citation.unknown
    )
    assert "at least" not in citation.paragraph
    assert "Thinsection [@thinsection]" in citation.paragraph


def test_a_file_that_was_deleted_does_not_count(
    two_encoders: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    shutil.copytree(two_encoders, out)
    (out / FINE / "features_efficientnet_lite0" / "c.h5").unlink()
    sentence = next(
        one
        for one in cite(out).account.sentences
        if one.startswith(f"Tiles of the grid {FINE} were embedded")
    )
    assert "2 slides" in sentence and "3 slides" not in sentence


def test_a_damaged_ledger_is_named_and_the_others_count(
    two_encoders: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    shutil.copytree(two_encoders, out)
    (out / "slides" / "c" / "slide.json").write_text("{")
    citation = cite(out)
    assert any(
        "results of c: their ledger is damaged" in line for line in citation.unknown
    )
    rows = rows_of(out / FINE / "tiles")
    assert (
        f"The grid {FINE} has {rows['a'] + rows['b_1']} tiles of 2 slides"
        in citation.text
    )


def test_bibtex_has_each_reference_once_and_the_paragraph_as_a_comment(
    two_encoders: Path,
) -> None:
    citation = cite(two_encoders)
    read = parse_bibtex(citation.bibtex)
    assert list(read) == ["thinsection", *(one.key for one in citation.references)]
    comment = citation.bibtex.splitlines()[1]
    cited = set(
        re.findall(r"[\w-]+", " ".join(re.findall(r"\\cite\{([^}]*)\}", comment)))
    )
    assert cited == set(read)
    assert "b\\_1" in citation.bibtex or "b_1" not in citation.paragraph
    assert not re.search(r"(?<!\\)[%&_#]", re.sub(r"\\cite\{[^}]*\}|^% ", "", comment))


def test_a_name_with_a_line_end_or_tex_stays_in_the_comment(tmp_path: Path) -> None:
    document = read_json(experiment(tmp_path / "x"))
    document["target"] = "grade\n@misc{evil,\\input{x}"
    write_json(tmp_path / "x" / "experiment.json", document)
    printed = cite(tmp_path / "x").bibtex
    assert list(parse_bibtex(printed)) == ["thinsection", "lu2021clam", *INTERVALS]
    assert r"\{evil,\textbackslash{}input\{x\}" in printed


INTERVALS = ("delong1988comparing", "obuchowski1997clustered", "newcombe2006effect")


def experiment(folder: Path) -> Path:
    """A hand-made experiment.json of two folds, without a model."""
    folder.mkdir()
    score = {"value": 0.75, "low": 0.5, "high": 0.9, "missing": "", "method": "DeLong"}
    document = {
        "head": "clam_sb",
        "task": "binary",
        "target": "grade",
        "cases": 40,
        "folds": [{}, {}],
        "scores": {"auroc": score},
        "temperature": 1.0,
        "left_out": {},
        "versions": {"thinsection": "0.2.0"},
        "settings": {
            "fit": {"weight_decay": 0.001, "seed": 3},
            "cross": {
                "folds": 2,
                "repeats": 1,
                "inner_folds": 5,
                "fold_unit": "patient",
            },
        },
    }
    path = folder / "experiment.json"
    write_json(path, document)
    return path


@pytest.mark.parametrize(
    ("change", "words", "keys"),
    [
        ({}, "by 2-fold cross-validation (the cases of a patient are in one fold)", ()),
        (
            {"cross": {"fold_unit": "site"}},
            "the cases of a site are in one fold (Howard et al. 2021)",
            ("howard2021site",),
        ),
        ({"cross": {"splits": "splits.csv"}}, "by the 2 splits of a file", ()),
        ({"cross": {"repeats": 4}}, "by 4 repeats of 2-fold cross-validation", ()),
        (
            {"temperature": 1.5},
            "temperature of 1.50 (Guo et al. 2017)",
            ("guo2017calibration",),
        ),
        (
            {"task": "cox"},
            "grade (cox (Cox 1972))",
            ("cox1972regression",),
        ),
        ({"left_out": {"s 1": "damaged"}}, "Slide s 1 was left out: damaged.", ()),
    ],
)
def test_an_experiment_says_its_folds_and_scores(
    tmp_path: Path, change: dict[str, object], words: str, keys: tuple[str, ...]
) -> None:
    path = experiment(tmp_path / "x")
    document = read_json(path)
    cross = change.pop("cross", {})
    document.update(change)
    document["settings"]["cross"].update(cross)
    write_json(path, document)
    citation = cite(path.parent)
    assert words in citation.text
    assert "on 40 cases" in citation.text
    assert "AUROC 0.75 (95 % confidence interval 0.50 to 0.90)" in citation.text
    assert keys_of(citation) == {"lu2021clam", *INTERVALS, *keys}
    assert citation.unknown == (
        "the embeddings of the training: model.safetensors is missing or damaged",
    )


@pytest.mark.parametrize("text", ["[1]", "{", '{"head": 3}', '{"settings": []}'])
def test_a_damaged_experiment_is_an_error_that_names_it(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(
        StoreError, match=r"experiment\.json must .* got .*experiment\.json"
    ):
        cite(tmp_path)


def test_an_imported_folder_says_what_is_not_known(
    two_encoders: Path, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs"
    export_peer(
        two_encoders, jobs, "trident", features=f"{FINE}/features_efficientnet_lite0"
    )
    (grid,) = [path for path in jobs.iterdir() if (path / "patches").is_dir()]
    features = next(grid.glob("features_*"))
    shutil.copytree(features, grid / "features_second_one")
    out = tmp_path / "imported"
    import_peer(jobs, out, "trident")
    citation = cite(out)
    number = sum(rows_of(two_encoders / FINE / "tiles").values())
    assert (
        f"{number} tiles of 3 slides, which were imported from trident" in citation.text
    )
    assert "zhang2025trident" in keys_of(citation)
    unknown = "\n".join(citation.unknown)
    assert "version and settings of trident, and how it found the tissue" in unknown
    assert "weights, precision and preprocessing of efficientnet_lite0" in unknown
    assert "second_one" in unknown
    assert "licence" not in citation.paragraph


KILLED = """
import os, signal, sys
import thinsection as ts

def kill(event):
    if event.result is not None:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    ts.run(sys.argv[2:], out=sys.argv[1], tile_px=128, memory="256MiB", on_event=kill)
"""


@pytest.mark.check
def test_a_killed_run_says_so_and_counts_what_is_complete(
    cohort: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    slides = [str(cohort / f"{name}.svs") for name in ("a", "b_1")]
    ended = subprocess.run(
        [sys.executable, str(script), str(out), *slides],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    embedded = rows_of(out / FINE / "features_efficientnet_lite0")
    tiles = rows_of(out / FINE / "tiles")
    citation = cite(out)
    assert any(
        "did not end (killed, or still running)" in line for line in citation.unknown
    )
    assert f"has {sum(tiles.values())} tiles of {len(tiles)} slide" in citation.text
    assert len(embedded) == 1
    (waiting,) = {"a", "b_1"} - set(embedded)
    assert any(
        f"of {waiting} by efficientnet_lite0" in line
        or f"has finished: {waiting}" in line
        for line in citation.unknown
    )
    ts.run(slides, out=out, tile_px=128, memory="256MiB")
    again = cite(out)
    assert "The cohort has 2 whole-slide images" in again.text
    assert not any("no command has finished" in line for line in again.unknown)
    assert sum(rows_of(out / FINE / "features_efficientnet_lite0").values()) == sum(
        rows_of(out / FINE / "tiles").values()
    )


def test_the_command_prints_text_and_bibtex_and_refuses_what_is_no_result(
    two_encoders: Path, tmp_path: Path
) -> None:
    citation = cite(two_encoders)
    assert thinsection("cite", two_encoders).stdout == citation.text + "\n"
    printed = thinsection("cite", two_encoders, "--format", "bibtex").stdout
    assert printed == citation.bibtex + "\n"
    ended = thinsection("cite", tmp_path)
    assert ended.returncode == 2 and "path must contain results of" in ended.stderr


def test_every_reference_of_the_text_stands_in_the_list(two_encoders: Path) -> None:
    text = cite(two_encoders).text
    paragraph, _, listed = text.partition("\nReferences\n")
    for one in known_references().values():
        assert (one.text in listed) == (f"{one.short}" in paragraph), one.key


def test_quality_control_cites_the_checks_that_its_file_has(
    cohort: Path, tmp_path: Path
) -> None:
    pipeline = tmp_path / "mine.toml"
    checks = ['[[check]]\nkind = "tissue"', '[[check]]\nkind = "focus"']
    pipeline.write_text(
        'name = "mine"\nwork_mpp = 8.0\nwork_from = "mpp"\n' + "\n".join(checks)
    )
    slides = [cohort / "a.svs", cohort / "c.svs"]
    ts.run(slides, out=tmp_path / "own", qc=str(pipeline), until="tiles", tile_px=128)
    own = cite(tmp_path / "own")
    assert (
        "with the pipeline mine" in own.text and ": tissue and focus." in own.paragraph
    )
    assert keys_of(own) == set()
    ts.run(slides, out=tmp_path / "his", qc="histoqc-light", until="tiles", tile_px=128)
    assert keys_of(cite(tmp_path / "his")) == {"janowczyk2019histoqc"}
    np.testing.assert_equal(
        len(rows_of(next((tmp_path / "own").glob("128px*/tiles")))), 2
    )
