"""Leaks that are named before training, and clean cohorts about which nothing is said."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import fisher_exact
from tests.predict.planted import write_embeddings

from thinsection.evaluation.audit import Audit, audit_features, id_key
from thinsection.evaluation.copies import copied_slides
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.leaks import NamedTiles, contents_of

Tiles = np.ndarray
Change = Callable[[Tiles, np.random.Generator], Tiles]
CASES = 24
DIM = 24


def slides_of(
    rng: np.random.Generator, *, blank: float = 0.0, count: int = CASES
) -> list[Tiles]:
    """Tiles of slides of six kinds of tissue, with a part that a slide has for itself."""
    kinds = rng.normal(size=(6, DIM)) * 1.5
    empty = rng.normal(size=DIM) * 3
    slides = []
    for _ in range(count):
        size = int(rng.integers(40, 90))
        kind = rng.choice(6, size, p=rng.dirichlet(np.ones(6)))
        own = rng.normal(size=DIM) * 0.3
        x = 2 + kinds[kind] + own + rng.normal(size=(size, DIM))
        is_blank = rng.random(size) < blank
        x[is_blank] = empty + 0.01 * rng.normal(size=(int(is_blank.sum()), DIM))
        slides.append(x)
    return slides


def audited(
    root: Path,
    slides: list[Tiles],
    *,
    names: list[str] | None = None,
    more: dict[str, list[str]] | None = None,
    **settings: object,
) -> Audit:
    """Audit of slides with two classes in turn, and more columns of the table."""
    root.mkdir(exist_ok=True)
    names = names or [f"s{i:03}" for i in range(len(slides))]
    columns = {"slide_id": names, "label": [str(i % 2) for i in range(len(slides))]}
    columns |= more or {}
    for name, x in zip(names, slides, strict=True):
        write_embeddings(root / f"{name}.h5", x)
    lines = [",".join(columns)]
    lines += [",".join(cells) for cells in zip(*columns.values(), strict=True)]
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    config = LabelsConfig(labels=root / "labels.csv", target=("label",), **settings)  # type: ignore[arg-type]
    return audit_features(root, config)


def half(x: Tiles, rng: np.random.Generator) -> Tiles:
    return x[rng.permutation(len(x))[: len(x) // 2]]


COPIES: dict[str, Change] = {
    "rescan": lambda x, rng: x + 0.1 * rng.normal(size=x.shape),
    "another scanner": lambda x, rng: x * (1 + 0.03 * rng.normal(size=x.shape[1])),
    "another scale": lambda x, rng: 3 * x,
    "another scale, rescanned": lambda x, rng: (
        0.5 * x + 0.05 * rng.normal(size=x.shape)
    ),
    "half of the tiles": half,
    "half, rescanned": lambda x, rng: half(x, rng) + 0.05 * rng.normal(size=DIM),
    "other order": lambda x, rng: x[rng.permutation(len(x))] + 1e-3,
    "every third tile": lambda x, rng: x[::3],
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_with_changed_content_are_counted_and_named(
    kind: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    slides = slides_of(rng)
    copies = [COPIES[kind](slides[i], rng) for i in (2, 5)]
    found = audited(tmp_path / "f", [*slides, *copies])
    pairs = {(one.first, one.second) for one in found.copies}
    assert pairs == {(2, CASES), (5, CASES + 1)}
    (warning,) = (line for line in found.warnings if "copies" in line)
    assert "2 pairs of slides" in warning
    assert "'s002' and 's024'" in warning


def test_equal_slides_of_three_patients_are_named_without_being_compared(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(1)
    slides = [x[:30] for x in slides_of(rng)]
    # all tiles of these are in the sample, so that each hides the others in the background
    found = audited(tmp_path / "f", [*slides, slides[2], slides[2], slides[5]])
    pairs = {(one.first, one.second): (one.by, one.tiles) for one in found.copies}
    wanted = [(2, CASES), (2, CASES + 1), (CASES, CASES + 1), (5, CASES + 2)]
    assert pairs == dict.fromkeys(wanted, ("equal", 1.0))


def test_a_rescan_is_found_beside_equal_copies_of_its_slide(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    slides = slides_of(rng)
    rescan = slides[2] + 0.1 * rng.normal(size=slides[2].shape)
    found = audited(tmp_path / "f", [*slides, slides[2], rescan])
    pairs = {(one.first, one.second): one.by for one in found.copies}
    assert pairs == {(2, CASES): "equal", (2, CASES + 1): "tiles"}


def test_a_cohort_of_few_slides_under_many_names_is_compared_as_the_few_are() -> None:
    rng = np.random.default_rng(4)
    slides = slides_of(rng, count=8)
    for copies in (1, 5):
        calls: list[int] = []

        def read(slide: int, rows: np.ndarray, calls: list[int] = calls) -> Tiles:
            calls.append(slide)
            return slides[slide % 8][rows]

        contents = contents_of(
            (NamedTiles(f"s{i}", "", slides[i % 8]) for i in range(8 * copies)),
            8 * copies,
        )
        pairs = copied_slides(
            contents.directions,
            contents.sampled_tiles,
            np.arange(8 * copies),
            read,
            digests=contents.digests,
            num_tiles=contents.num_tiles,
        )
        compared = sorted(calls)
        if copies == 1:
            alone = compared
            assert compared and not pairs
        else:
            assert compared == alone
            # of five equal slides, all pairs but that of the first and the last
            assert len(pairs) == 8 * 9


def test_copies_of_one_patient_are_no_leak(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    slides = slides_of(rng)
    again = slides[2] + 0.1 * rng.normal(size=slides[2].shape)
    patients = [f"p{i}" for i in range(CASES)] + ["p2"]
    # the copy has the class of its patient
    labels = [str(i % 2) for i in range(CASES)] + ["0"]
    found = audited(
        tmp_path / "f", [*slides, again], more={"patient_id": patients, "label": labels}
    )
    assert not found.copies
    assert not found.warnings


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["plain", "blank", "two stains", "outlier"])
def test_clean_cohorts_raise_no_alarm(kind: str, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    slides = slides_of(rng, blank=0.8 if kind == "blank" else 0.0)
    names = [f"S20-{i:05}" for i in range(1, CASES + 1)]
    more = {"site": [f"h{rng.integers(2)}" for _ in names]}
    if kind == "two stains":
        stained = [x + 2 * rng.normal(size=DIM) for x in slides[:6]]
        slides = [*slides, *stained]
        names += [f"{name}-CD3" for name in names[:6]]
        more["site"] += more["site"][:6]
    if kind == "outlier":
        slides[3][0, 5] = slides[8][4, 5] = 65504
    found = audited(tmp_path / "f", slides, names=names, more=more, site="site")
    assert not found.warnings
    assert not found.copies


def test_a_site_that_equals_the_label_is_named_with_its_exact_test(
    tmp_path: Path,
) -> None:
    slides = slides_of(np.random.default_rng(2))
    sites = ["north" if i % 2 else "south" for i in range(CASES)]
    found = audited(tmp_path / "f", slides, more={"site": sites}, site="site")
    assert found.sites is not None
    assert found.sites.counts == ((0, 12), (12, 0))
    expected = fisher_exact([[0, 12], [12, 0]]).pvalue
    assert found.sites.p_value == pytest.approx(expected)
    assert any("the site alone determines label" in w for w in found.warnings)


def test_a_site_that_goes_with_the_label_is_named_by_permutations(
    tmp_path: Path,
) -> None:
    slides = slides_of(np.random.default_rng(3), count=60)
    sites = [("a", "b")[i % 2] if i < 44 else "c" for i in range(60)]
    found = audited(tmp_path / "f", slides, more={"site": sites}, site="site")
    assert found.sites is not None
    assert found.sites.p_value == 1 / 2000
    assert any("the site is associated with label" in line for line in found.warnings)


def test_ids_in_two_spellings_are_named(tmp_path: Path) -> None:
    slides = slides_of(np.random.default_rng(4))
    patients = [f"PAT-{i:03}" for i in range(CASES - 1)] + ["PAT_001"]
    found = audited(tmp_path / "f", slides, more={"patient_id": patients})
    (warning,) = found.warnings
    assert "'PAT-001' and 'PAT_001'" in warning


def test_keys_of_ids_join_spellings_and_no_other_ids() -> None:
    assert id_key("1007.0") == id_key("1007") == id_key(" 01007")
    assert id_key("PAT-001") == id_key("pat_1") == id_key("PAT001")
    distinct = ["S1-11", "S11-1", "S20-00001", "S20-00010", "B1-HE", "B1-CD3"]
    assert len({id_key(text) for text in distinct}) == len(distinct)


def test_a_column_that_equals_the_target_is_named(tmp_path: Path) -> None:
    slides = slides_of(np.random.default_rng(5))
    words = ["tumour" if i % 2 else "normal" for i in range(CASES)]
    more = {"diagnosis": words, "age": [str(40 + i) for i in range(CASES)]}
    found = audited(tmp_path / "f", slides, more=more)
    assert any("column diagnosis equals label" in line for line in found.notes)
    assert not any("age" in line for line in found.notes)
    used = audited(tmp_path / "g", slides, more=more, subgroup=("diagnosis",))
    assert any("column diagnosis equals label" in line for line in used.warnings)


def test_what_cannot_be_known_is_said(tmp_path: Path) -> None:
    found = audited(tmp_path / "f", slides_of(np.random.default_rng(6)))
    said = "; ".join(found.unknown)
    assert "biopsy" in said
    assert "no site is known" in said
    assert "patients unknown" in said
