"""CRoMa, MaRI and nIPD: by hand, by loops, and as the package croma 1.0.1 has them."""

from collections.abc import Iterator

import numpy as np
import pytest

from thinsection.errors import InvalidInputError
from thinsection.evaluation.metrics import weighted_median
from thinsection.probe.data.sets import RobustnessSet
from thinsection.probe.probes.croma import croma_probe
from thinsection.probe.probes.pathorob import (
    margin_aware_index,
    normalized_degradation,
    robustness_probe,
)
from thinsection.types import MIB

PAIRS = ((("0", "1"), ("0", "1")), (("1", "2"), ("0", "2")))  # classes, centres


def table(seed: int, *, paired: bool = False) -> RobustnessSet:
    """600 tiles of three classes at three centres with six slides each; slides mix classes."""
    rng = np.random.default_rng(seed)
    biology, centre, number = (rng.integers(n, size=600) for n in (3, 3, 6))
    x = rng.normal(size=(600, 16)) * 0.5 + 1
    x[:, 0] += biology * 0.8
    x[:, 1] += centre * 0.3 * seed
    slide = [f"{c}-{s}" for c, s in zip(centre, number, strict=True)]
    columns = (biology.astype(str), centre.astype(str), np.array(slide))
    rows, pair = np.arange(600), ()
    if paired:
        of_pairs = [
            np.flatnonzero(np.isin(columns[0], b) & np.isin(columns[1], c))
            for b, c in PAIRS
        ]
        rows = np.concatenate(of_pairs)
        pair = tuple(np.repeat(["p", "q"], [*map(len, of_pairs)]).tolist())
    names = ("biological_class", "medical_center", "slide_id")
    of_names = {
        name: tuple(column[rows].tolist())
        for name, column in zip(names, columns, strict=True)
    }
    embeddings = x.astype(np.float32)[rows]
    return RobustnessSet(name="own", embeddings=embeddings, pair=pair, **of_names)


# of croma 1.0.1 on the same tables: CRoMa, lower tail, share at most 0; MaRI and tau for k = 11
CROMA_1_0_1 = {
    (1, False): (0.070153841249, -0.113947404095, 0.276666666667, 0.668027573734, 0.068698624584),
    (1, True): (0.032633723260, -0.152953265586, 0.384466019417, 0.580491468911, 0.078441788349),
    (3, False): (0.022330945976, -0.212565959680, 0.443333333333, 0.538855198666, 0.066325909280),
    (3, True): (-0.040654698252, -0.274100177146, 0.595978062157, 0.429142513333, 0.077990296797),
}  # fmt: skip


@pytest.mark.parametrize(("seed", "paired"), CROMA_1_0_1)
def test_values_are_those_of_the_package(seed: int, paired: bool) -> None:
    data = table(seed, paired=paired)
    margin = croma_probe(data)
    index = robustness_probe(data, k=11)
    found = (
        margin.score,
        margin.details["lower_tail_mean"],
        margin.details["share_at_most_0"],
        index.details["margin_aware_index"],
        index.details["temperature"],
    )
    assert found == pytest.approx(CROMA_1_0_1[seed, paired], abs=2e-6)
    assert margin.interval is not None
    assert margin.interval.low < margin.score < margin.interval.high
    assert margin.interval.unit == "slides"


def plain_margins(data: RobustnessSet, m: int) -> Iterator[float]:
    """Tile by tile, over all others."""
    x = data.embeddings.astype(np.float64)
    x /= np.linalg.norm(x, axis=1)[:, None]
    tiles = [
        *zip(data.biological_class, data.medical_center, data.slide_id, strict=True)
    ]
    for i, (biology, centre, slide) in enumerate(tiles):
        so: list[float] = []
        os: list[float] = []
        for j, (other, place, own) in enumerate(tiles):
            if own != slide and (other == biology) != (place == centre):
                (so if other == biology else os).append(1 - x[i] @ x[j])
        near, far = (np.mean(sorted(kind)[:m]) for kind in (so, os))
        yield (far - near) / (far + near)


@pytest.mark.parametrize("m", [1, 3])
def test_margins_are_those_of_a_loop_in_any_memory(m: int) -> None:
    data = table(2)
    expected = [*plain_margins(data, m)]
    for budget in (MIB, 64 * MIB):
        result = croma_probe(data, num_neighbours=m, budget_bytes=budget)
        assert result.rows is not None
        margins = np.array([*result.rows.columns["margin"]])
        np.testing.assert_allclose(margins, expected, atol=1e-9)
        assert result.score == pytest.approx(np.median(expected), abs=1e-9)


def small(biology: str, centre: str, slide: str, x: list[float]) -> RobustnessSet:
    """One letter a tile; vectors at angles x."""
    return RobustnessSet(
        name="small",
        embeddings=np.stack([np.cos(x), np.sin(x)], axis=1).astype(np.float32),
        biological_class=tuple(biology),
        medical_center=tuple(centre),
        slide_id=tuple(slide),
    )


def test_a_margin_by_hand() -> None:
    # each tile has one of its class elsewhere, .1 rad away, and one of the other at home, .2 or .4
    data = small("abab", "xxyy", "1234", [0.0, 0.2, 0.1, 0.3])
    expected = [
        (home - away) / (home + away)
        for home, away in ((1 - np.cos(0.2), 1 - np.cos(0.1)),) * 4
    ]
    result = croma_probe(data, num_neighbours=1)
    assert result.rows is not None
    found = [*result.rows.columns["margin"]]
    assert found == pytest.approx(expected, abs=1e-5)  # float32 vectors, small angles


@pytest.mark.parametrize(
    ("biology", "centre", "slide", "message"),
    [
        ("aabb", "xxxx", "1234", r"of its class at other centres .* row 0 of 'small' \(class 'a'"),
        ("aaaa", "xxyy", "1234", r"of other classes at its centre .* row 0 of 'small'"),
        # the two tiles at x share a slide
        ("baab", "xxyy", "1134", r"of other classes at its centre .* row 1 of 'small'"),
    ],
)  # fmt: skip
def test_a_tile_without_enough_neighbours_is_named(
    biology: str, centre: str, slide: str, message: str
) -> None:
    data = small(biology, centre, slide, [0.0, 0.2, 0.1, 0.3])
    with pytest.raises(InvalidInputError, match=f"must have 1 tiles {message}"):
        croma_probe(data, num_neighbours=1)


def test_a_tile_that_equals_all_its_neighbours_is_named() -> None:
    data = small("abab", "xxyy", "1234", [0.1, 0.1, 0.1, 0.3])
    with pytest.raises(InvalidInputError, match=r"got row 0 of 'small' \(slide '1'\)"):
        croma_probe(data, num_neighbours=1)


def test_the_median_of_weights_is_that_of_repeated_values() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=9).round(1)
    weights = rng.integers(4, size=(50, 9)).astype(np.float64)
    weights[0] = 0
    found = weighted_median(values, weights)
    assert np.isnan(found[0])
    repeated = [np.repeat(values, row.astype(int)) for row in weights[1:]]
    np.testing.assert_allclose(found[1:], [*map(np.median, repeated)])


def test_near_neighbours_count_more_in_the_margin_aware_index() -> None:
    so, os = np.array([0.1, 0.3]), np.array([0.2, 0.4, 0.5])
    index, temperature = margin_aware_index(so, os)
    assert temperature == 0.3
    weights = np.exp(-np.array([0.1, 0.3, 0.2, 0.4, 0.5]) / 0.3)
    assert index == pytest.approx(weights[:2].sum() / weights.sum())
    # without a scale all count alike: the robustness index
    assert margin_aware_index(np.zeros(3), np.zeros(1)) == (0.75, 0.0)


def test_degradation_counts_what_lies_above_chance() -> None:
    falls = np.linspace(0.9, 0.5, 6)
    assert normalized_degradation(falls, 0.5) == pytest.approx(-0.5)
    assert normalized_degradation(np.full(4, 0.8), 0.5) == 0
    assert normalized_degradation(np.array([0.5, 0.4]), 0.5) is None
    # of croma 1.0.1
    accuracy = np.linspace(0.9, 0.6, 24).reshape(6, 4) ** 2
    found = normalized_degradation(accuracy.mean(axis=1), 0.25)
    assert found == pytest.approx(-0.3931276423495548, abs=1e-12)
