"""Audit of a user's rows: planted leaks are named, a clean cohort is not, as `audit` does it."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import fisher_exact
from tests.evaluation.test_audit import audited, slides_of

import thinsection as ts
from thinsection.errors import InvalidInputError

ROWS = 24
LABELS = ["0", "1"] * (ROWS // 2)
SLIDES = [f"s{row:03}" for row in range(ROWS)]


def test_the_findings_are_those_of_the_command(tmp_path: Path) -> None:
    """The same tiles as files with a table, and as arrays; slide 7 is a rescan of slide 2."""
    rng = np.random.default_rng(0)
    slides = slides_of(rng)
    slides[7] = slides[2] + 0.1 * rng.normal(size=slides[2].shape)
    sites = ["north: a" if row % 2 else "south" for row in range(ROWS)]
    patients = [f"Q {row}" for row in range(ROWS)]
    wanted = audited(
        tmp_path / "data",
        slides,
        more={"patient_id": patients, "hospital": sites},
        site="hospital",
    )
    as_stored = [x.astype(np.float32) for x in slides]
    got = ts.audit(
        LABELS, embeddings=as_stored, patients=patients, sites=sites, cases=SLIDES
    )
    assert got.copies == wanted.copies and got.copies
    assert got.copied_slides == (("s002", "s007"),)
    assert got.sites is not None and wanted.sites is not None
    assert got.sites.counts == wanted.sites.counts
    assert got.sites.p_value == pytest.approx(fisher_exact(got.sites.counts).pvalue)
    words = [line.split(":")[0] for line in wanted.warnings]
    assert words[1] == "the site alone determines label"
    assert [line.split(":")[0] for line in got.warnings] == [words[0], f"{words[1]}s"]


def test_nothing_is_said_about_a_clean_cohort() -> None:
    slides = slides_of(np.random.default_rng(3))
    patients = [f"Q{row}" for row in range(ROWS)]
    folds = ts.folds(LABELS, patients=patients, folds=4)
    found = ts.audit(
        LABELS,
        embeddings=slides,
        patients=patients,
        sites=["north", "north", "south", "south"] * 6,
        folds=folds,
    )
    assert found.warnings == () and found.copies == ()
    assert repr(found).startswith("Audit(0 warnings, 2 notes")
    assert "no copies of slides under other names were found" in str(found)


def test_a_patient_and_a_copy_on_two_sides_of_a_split_are_named() -> None:
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(ROWS, 16)).astype(np.float32)
    vectors[20] = vectors[3]
    patients = [f"P{row // 2}" for row in range(ROWS)]
    rows = np.arange(ROWS)
    leaking = [(rows[rows % 2 == 0], rows[rows % 2 == 1])]
    found = ts.audit(
        LABELS, embeddings=vectors, patients=patients, cases=SLIDES, folds=leaking
    )
    assert found.warnings[0].startswith(
        "training and test set share 12 patients ('P0', 'P1', 'P10', ...) in 1 fold"
    )
    assert "1 pair equal in float16 ('s003' and 's020')" in found.warnings[1]
    clean = ts.folds(LABELS, patients=patients, folds=3)
    again = ts.audit(LABELS, patients=patients, folds=clean)
    assert not any("share" in line for line in again.warnings)
    assert "which slides are copies of others: there are no embeddings" in again.unknown


def test_two_spellings_of_a_patient_are_named() -> None:
    patients = ["PAT-001", "PAT_001", *(f"Q{row}" for row in range(ROWS - 2))]
    found = ts.audit(LABELS, patients=patients)
    assert "'PAT-001' and 'PAT_001'" in found.warnings[0]


def test_embeddings_on_disk_are_read_one_at_a_time(tmp_path: Path) -> None:
    from tests.predict.planted import write_embeddings

    from thinsection.store.tile_tables import EmbeddingRows

    slides = slides_of(np.random.default_rng(5), count=8)
    for name, x in zip(SLIDES, slides, strict=False):
        write_embeddings(tmp_path / f"{name}.h5", x)
    stored = [EmbeddingRows(tmp_path / f"{name}.h5") for name in SLIDES[:8]]
    of_files = ts.audit(LABELS[:8], embeddings=stored)  # type: ignore[arg-type]
    of_arrays = ts.audit(LABELS[:8], embeddings=[x.astype(np.float32) for x in slides])
    assert of_files == of_arrays


def test_what_does_not_fit_is_refused() -> None:
    vectors = np.ones((3, 4))
    with pytest.raises(
        InvalidInputError, match="embeddings must have one entry per row, got 3 for 4"
    ):
        ts.audit(["a", "b", "a", "b"], embeddings=vectors)
    with pytest.raises(
        InvalidInputError, match=r"embeddings must be finite, got NaN .* 'row 1'"
    ):
        ts.audit(["a", "b"], embeddings=[np.ones((2, 3)), np.full((2, 3), np.nan)])
    with pytest.raises(
        InvalidInputError, match=r"shape \(n, D\) or \(D,\), got int64 \(2, 3\)"
    ):
        ts.audit(["a", "b"], embeddings=[np.ones((2, 3), int)] * 2)
    with pytest.raises(
        InvalidInputError, match="folds must have rows 0 to 1, got 0 to 2"
    ):
        ts.audit(["a", "b"], folds=[(np.array([0]), np.array([0, 2]))])
