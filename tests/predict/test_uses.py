"""The memory of a test set: which models were tested on the same cases before."""

from dataclasses import replace
from pathlib import Path

from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.target import Target
from thinsection.predict.uses import FOLDER, Use, Uses, record_use, use_of

TARGET = Target(kind="binary", columns=("grade",), names=("low", "high"))
SLIDES = 6


def cohort(cases: int = SLIDES, *, names: str = "s") -> Cohort:
    slides = [f"{names}{i}" for i in range(cases)]
    return Cohort(
        target=TARGET,
        place="features",
        cases=tuple(slides),
        slides=tuple((slide,) for slide in slides),
        files=tuple((slide,) for slide in slides),
        values=tuple((float(i % 2),) for i in range(cases)),
        patients=tuple(slides),
        unit="slides",
    )


def use(model: str, of: Cohort, *, day: int, encoder: str = "a") -> Use:
    digests = [f"{encoder}{i}" for i in range(len(of.cases))]
    date = f"2026-01-{day:02}T10:00:00+00:00"
    return use_of(of, digests, model=model, sha256=model * 8, date=date)


def names(uses: Uses) -> list[str]:
    return [f"{one.model} {one.date} {one.shared}" for one in uses.earlier]


def test_each_other_model_on_the_same_cases_is_counted_once(tmp_path: Path) -> None:
    first = record_use(use("m1", cohort(), day=1), [tmp_path])
    assert first == Uses(recorded_in=(tmp_path.name,)) and first.number == 1
    for day, model in ((2, "m2"), (3, "m3"), (4, "m2")):
        record_use(use(model, cohort(), day=day), [tmp_path])
    fourth = record_use(use("m4", cohort(), day=5), [tmp_path])
    assert fourth.number == 4
    assert names(fourth) == ["m1 2026-01-01 6", "m2 2026-01-02 6", "m3 2026-01-03 6"]
    again = record_use(use("m1", cohort(), day=6), [tmp_path])
    assert again.number == 1  # the same model on the same cases keeps its place
    assert [one.model for one in again.later] == ["m2", "m3", "m4"]


def test_other_embeddings_labels_or_a_part_of_the_cases_are_known_or_new(
    tmp_path: Path,
) -> None:
    record_use(use("m1", cohort(), day=1), [tmp_path])
    less = record_use(use("m2", cohort(SLIDES - 1), day=2), [tmp_path])
    assert names(less) == ["m1 2026-01-01 5"]
    renamed = record_use(use("m3", cohort(names="x"), day=3), [tmp_path])
    assert names(renamed) == ["m1 2026-01-01 6", "m2 2026-01-02 5"]
    encoder = record_use(use("m4", cohort(), day=4, encoder="b"), [tmp_path])
    assert names(encoder) == ["m1 2026-01-01 6"]
    swapped = replace(
        cohort(), values=tuple((1 - value,) for (value,) in cohort().values)
    )
    assert record_use(use("m5", swapped, day=5), [tmp_path]).number == 1


def test_a_use_is_found_by_either_folder(tmp_path: Path) -> None:
    labels, results, copy = (tmp_path / name for name in ("labels", "results", "copy"))
    record_use(use("m1", cohort(), day=1), [labels, results])
    assert record_use(use("m2", cohort(), day=2), [labels]).number == 2
    assert record_use(use("m3", cohort(), day=3), [copy, results]).number == 2
    assert record_use(use("m4", cohort(), day=4), [labels, results]).number == 4


def test_a_folder_that_cannot_be_written_is_said_and_fails_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / FOLDER).write_text("a file in the way")
    uses = record_use(use("m1", cohort(), day=1), [tmp_path])
    assert uses.number == 1 and uses.recorded_in == ()
    assert "could not be recorded" in uses.missing and tmp_path.name in uses.missing
    other = tmp_path / "other"
    assert record_use(use("m1", cohort(), day=1), [tmp_path, other]).missing == ""


def test_damaged_records_are_named_and_hold_no_ids(tmp_path: Path) -> None:
    record_use(use("m1", cohort(), day=1), [tmp_path])
    (record,) = (tmp_path / FOLDER).iterdir()
    text = record.read_text()
    assert "s1" not in text and str(tmp_path) not in text
    for name, content in {"a.json": "{", "b.json": "[1]", "c.json": "{}"}.items():
        (tmp_path / FOLDER / name).write_text(content)
    uses = record_use(use("m2", cohort(), day=2), [tmp_path])
    assert uses.number == 2
    assert uses.missing == "records that cannot be read: a.json, b.json, c.json"
