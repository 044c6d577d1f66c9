"""Stain normalisation: against float64 written plainly, on synthetic tissue and on bad slides."""

from pathlib import Path

import numpy as np
import pytest
import torch  # noqa: F401 - it is not what the memory test measures
from PIL import Image

from thinsection.errors import ConfigError, InvalidInputError
from thinsection.qc import tissue_mask
from thinsection.slide import open_slide
from thinsection.testing.memory import run_and_measure
from thinsection.testing.synthetic import ArraySlide, he_texture, write_he_slide
from thinsection.tiles import TilesConfig, fit_stain, iter_tiles, tile_grid
from thinsection.tiles.transforms import (
    STANDARDS,
    ColourMoments,
    StainConfig,
    StainStatistics,
    StainVectors,
    sample_px,
    stain_target,
)
from thinsection.types import MIB, MaskFrame

METHODS = ("macenko", "reinhard")
HEMATOXYLIN, EOSIN = np.array((0.65, 0.70, 0.29)), np.array((0.07, 0.99, 0.11))
RGB_TO_LMS = [
    (0.3811, 0.5783, 0.0402),
    (0.1967, 0.7244, 0.0782),
    (0.0241, 0.1288, 0.8444),
]


def stained(seed: int = 0, size: tuple[int, int] = (700, 430)) -> np.ndarray:
    """Px of two stains in known amounts on white glass."""
    rng = np.random.default_rng(seed)
    amounts = rng.gamma(2.0, 0.3, (size[1], size[0], 2))
    amounts[:, :, 0] *= rng.random((size[1], size[0])) < 0.5
    vectors = np.stack([v / np.linalg.norm(v) for v in (HEMATOXYLIN, EOSIN)])
    return np.clip(np.rint(240 * np.exp(-amounts @ vectors)), 0, 255).astype(np.uint8)


def every_colour() -> np.ndarray:
    """Tiles with all dark, bright and mixed values: (4, 96, 96, 3)."""
    tiles = np.random.default_rng(3).integers(0, 256, (4, 96, 96, 3)).astype(np.uint8)
    tiles[0] = he_texture(np.random.default_rng(0))[:96, :96]
    tiles[1, :, :, :] = np.arange(96, dtype=np.uint8)[None, :, None] + 160
    return tiles


def plain_macenko(
    tiles: np.ndarray, source: StainVectors, target: StainVectors
) -> np.ndarray:
    """Amounts of stain by least squares, scaled, with the target's vectors; float64."""
    density = -np.log((tiles.reshape(-1, 3).astype(np.float64) + 1) / 240)
    own = np.array([source.hematoxylin, source.eosin]).T
    amounts = np.linalg.lstsq(own, density.T, rcond=None)[0]
    amounts = (
        amounts
        / np.array(source.strengths)[:, None]
        * np.array(target.strengths)[:, None]
    )
    made = 240 * np.exp(-np.array([target.hematoxylin, target.eosin]).T @ amounts)
    return made.T.reshape(tiles.shape)


def plain_reinhard(
    tiles: np.ndarray, source: ColourMoments, target: ColourMoments
) -> np.ndarray:
    """Each axis of l, alpha, beta scaled to the target's mean and deviation; float64."""
    lms = np.log(
        np.maximum(tiles.reshape(-1, 3), 1).astype(np.float64) @ np.array(RGB_TO_LMS).T
    )
    big, middle, small = lms.T
    axes = [
        (big + middle + small) / 3**0.5,
        (big + middle - 2 * small) / 6**0.5,
        (big - middle) / 2**0.5,
    ]
    moments = zip(axes, source.mean, source.spread, target.mean, target.spread)
    light, yellow, red = ((a - m) / s * t + u for a, m, s, u, t in moments)
    big = light / 3**0.5 + yellow / 6**0.5 + red / 2**0.5
    middle = light / 3**0.5 + yellow / 6**0.5 - red / 2**0.5
    small = light / 3**0.5 - 2 * yellow / 6**0.5
    made = np.linalg.solve(np.array(RGB_TO_LMS), np.exp([big, middle, small]))
    return made.T.reshape(tiles.shape)


PLAIN = {"macenko": plain_macenko, "reinhard": plain_reinhard}
KINDS: dict[str, type[StainVectors] | type[ColourMoments]] = {
    "macenko": StainVectors,
    "reinhard": ColourMoments,
}


@pytest.mark.parametrize("method", METHODS)
def test_a_transform_is_the_plain_formula_in_place_but_for_ties(method: str) -> None:
    slide, tiles = ArraySlide([stained()]), every_colour()
    config = StainConfig(stain_norm=method)
    look = KINDS[method].estimate(sample_px(slide, None, config), "here")
    plain = PLAIN[method](tiles, look, STANDARDS[method])
    given = tiles.copy()
    made = fit_stain(slide, None, config)(given)
    assert made is given
    wanted = np.clip(np.rint(plain), 0, 255)
    tie = np.abs(np.abs(plain - np.floor(plain)) - 0.5) < 1e-3
    assert tie.mean() < 0.005
    np.testing.assert_array_equal(made[~tie], wanted[~tie])
    assert np.abs(made - wanted).max() <= 1
    assert np.abs(made.astype(int) - tiles).mean() > 2  # it did something


@pytest.mark.parametrize("method", METHODS)
def test_maps_far_beyond_the_brightest_px_end_at_white_without_a_warning(
    method: str,
) -> None:
    config, tiles = StainConfig(stain_norm=method), every_colour()
    look: StainStatistics = StainVectors(
        hematoxylin=(0.5626, 0.7201, 0.4062),
        eosin=(0.5600, 0.7220, 0.4070),
        strengths=(1e-3, 1e-3),
    )
    if method == "reinhard":
        look = ColourMoments(mean=(-90.0, 0.0, 0.0), spread=(1e-3, 1e-3, 1e-3))
    target = stain_target(config)
    made = look.transform_to(target)(tiles)
    assert set(np.unique(made)) & {0, 255}


def test_macenko_finds_the_two_stains_that_made_the_px() -> None:
    look = StainVectors.estimate(stained().reshape(-1, 3), "here")
    for found, true in ((look.hematoxylin, HEMATOXYLIN), (look.eosin, EOSIN)):
        cosine = np.dot(found, true) / np.linalg.norm(found) / np.linalg.norm(true)
        assert np.degrees(np.arccos(min(1.0, cosine))) < 5
    amounts = np.random.default_rng(0).gamma(2.0, 0.3, 10**6)
    assert look.strengths[1] == pytest.approx(np.percentile(amounts, 99), rel=0.2)


@pytest.mark.parametrize("method", METHODS)
def test_normalised_px_have_the_targets_look(method: str) -> None:
    slide = ArraySlide([stained()])
    config = StainConfig(stain_norm=method, stain_mpp=0.5)
    px = stained().reshape(1, 430, 700, 3)
    made = KINDS[method].estimate(
        fit_stain(slide, None, config)(px).reshape(-1, 3), "made"
    )
    target = STANDARDS[method]
    if isinstance(made, StainVectors) and isinstance(target, StainVectors):
        np.testing.assert_allclose(made.hematoxylin, target.hematoxylin, atol=0.05)
        np.testing.assert_allclose(made.eosin, target.eosin, atol=0.05)
        np.testing.assert_allclose(made.strengths, target.strengths, rtol=0.05)
    elif isinstance(made, ColourMoments) and isinstance(target, ColourMoments):
        np.testing.assert_allclose(made.mean, target.mean, atol=0.1)
        np.testing.assert_allclose(made.spread, target.spread, rtol=0.25)


@pytest.mark.parametrize("method", METHODS)
def test_a_picture_as_reference_gives_its_own_look(method: str, tmp_path: Path) -> None:
    picture = he_texture(np.random.default_rng(5))[:300, :420]
    Image.fromarray(picture).save(tmp_path / "target.png")
    config = StainConfig(
        stain_norm=method, stain_reference=str(tmp_path / "target.png")
    )
    target = stain_target(config)
    assert target != STANDARDS[method]
    with open_slide(tmp_path / "target.png") as slide:
        transform = fit_stain(slide, tissue_mask(slide), config, target=target)
    made = transform(picture[None].copy())[0]
    assert np.abs(made.astype(int) - picture).mean() < (
        12 if method == "macenko" else 0.1
    )


def test_the_fit_is_the_same_to_the_bit_each_time_and_reads_only_tissue(
    tmp_path: Path,
) -> None:
    write_he_slide(tmp_path / "a.svs", (3000, 2000))
    config = StainConfig(stain_norm="macenko", stain_places=9)
    fits = []
    for _ in range(2):
        with open_slide(tmp_path / "a.svs") as slide:
            tissue = tissue_mask(slide)
            fits.append(fit_stain(slide, tissue, config))
            px = sample_px(slide, tissue, config)
            pair = sample_px(slide, (tissue.mask, tissue.frame), config)
    assert fits[0].matrix is not None
    np.testing.assert_array_equal(fits[0].matrix, fits[1].matrix)
    np.testing.assert_array_equal(px, pair)
    assert 0 < len(px) <= 9 * 256 * 256
    # two thirds of the slide are white; of the mask the small holes, which it closes
    assert (px.min(axis=1) > 235).mean() < 0.25


def test_the_mask_decides_which_px_are_taken() -> None:
    px = np.full((512, 768, 3), 250, np.uint8)
    px[100:300, 200:500] = (120, 60, 110)
    mask = np.zeros((128, 192), dtype=bool)
    mask[25:75, 50:125] = True
    frame = MaskFrame(size_th=(192, 128), size_l0=(768, 512))
    found = sample_px(
        ArraySlide([px]), (mask, frame), StainConfig(stain_norm="macenko")
    )
    assert len(found) == 200 * 300 // 4  # at 1.0 of 0.5 µm/px
    inner = (np.abs(found.astype(int) - (120, 60, 110)) <= 40).all(axis=1)
    assert inner.mean() > 0.95


@pytest.mark.parametrize("mpp", [None, (2.0, 2.0), (0.5, 0.25)])
def test_slides_without_an_mpp_or_coarser_than_asked_are_read_as_they_are(
    mpp: tuple[float, float] | None,
) -> None:
    slide = ArraySlide([stained(size=(1024, 768))], slide_mpp=mpp)
    px = sample_px(slide, None, StainConfig(stain_norm="macenko"))
    assert len(px) == 1024 * 768 // (8 if mpp == (0.5, 0.25) else 1)


def test_a_slide_without_tissue_is_left_as_it_is_with_a_warning() -> None:
    white = ArraySlide([np.full((300, 400, 3), 245, np.uint8)])
    for method in METHODS:
        transform = fit_stain(white, tissue_mask(white), StainConfig(stain_norm=method))
        assert transform.warning is not None
        assert "no tissue" in transform.warning
        tiles = every_colour()
        np.testing.assert_array_equal(transform(tiles.copy()), tiles)


def one_stain() -> np.ndarray:
    amounts = np.random.default_rng(0).gamma(2.0, 0.4, (300, 400, 1))
    return np.rint(240 * np.exp(-amounts * (HEMATOXYLIN / 1.0))).astype(np.uint8)


def grey() -> np.ndarray:
    values = np.random.default_rng(0).integers(20, 200, (300, 400, 1))
    return values.repeat(3, axis=2).astype(np.uint8)


@pytest.mark.parametrize(
    ("method", "px", "message"),
    [
        (
            "macenko",
            one_stain(),
            r"must have two stains in the tissue, got hues [\d.]+° apart",
        ),
        (
            "macenko",
            grey(),
            r"must have two stains in the tissue, got hues 0\.0° apart",
        ),
        (
            "macenko",
            np.full((300, 400, 3), 245, np.uint8),
            "must have >= 256 of the tissue, got 0",
        ),
        (
            "reinhard",
            grey(),
            r"must have several colours in the tissue, got spreads of",
        ),
        (
            "reinhard",
            np.full((9, 9, 3), 90, np.uint8),
            "must have >= 256 px of the tissue",
        ),
    ],
)
def test_slides_without_two_stains_are_refused_with_the_remedy(
    method: str, px: np.ndarray, message: str
) -> None:
    slide = ArraySlide([px], name="odd.svs")
    with pytest.raises(
        InvalidInputError,
        match=message + r".* in 'odd\.svs'; remove the slide from the run",
    ):
        fit_stain(slide, None, StainConfig(stain_norm=method))


def test_no_method_changes_nothing() -> None:
    tiles = every_colour()
    transform = fit_stain(ArraySlide([stained()]), None, StainConfig())
    np.testing.assert_array_equal(transform(tiles.copy()), tiles)
    assert transform.warning is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stain_mpp": 0.0}, "stain_mpp must be > 0"),
        ({"stain_places": 0}, "stain_places must be >= 1"),
        (
            {"stain_reference": "a.png"},
            "must be combined with a method, got 'a.png' and 'none'",
        ),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StainConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tiles",
    [np.zeros((1, 8, 8, 3), np.float32), np.zeros((1, 8, 8, 6), np.uint8)[..., ::2]],
)
def test_tiles_that_cannot_be_changed_in_place_are_refused(tiles: np.ndarray) -> None:
    transform = fit_stain(
        ArraySlide([stained()]), None, StainConfig(stain_norm="macenko")
    )
    with pytest.raises(InvalidInputError, match="tiles must be contiguous uint8"):
        transform(tiles)


@pytest.mark.parametrize("segment", [None, (32, 32)])
def test_the_stream_transforms_what_filters_keep_after_they_have_seen_it(
    segment: tuple[int, int] | None,
) -> None:
    slide = ArraySlide([stained()], segment=segment)
    table = tile_grid(slide, TilesConfig(tile_px=32))
    transform = fit_stain(slide, None, StainConfig(stain_norm="reinhard"))
    seen: list[np.ndarray] = []

    def even(tiles: np.ndarray) -> np.ndarray:
        seen.append(tiles.copy())
        return np.asarray(tiles[:, 0, 0, 0] % 2 == 0)

    plain = stained()
    found = 0
    for batch in iter_tiles(
        slide, table, batch_size=7, filters=[even], transform=transform
    ):
        for (x, y), tile in zip(batch.coords_l0.tolist(), batch.tiles):
            own = plain[y : y + 32, x : x + 32].copy()
            np.testing.assert_array_equal(tile, transform(own[None])[0])
            found += 1
    firsts = np.sort([int(t[0, 0, 0]) for part in seen for t in part])
    raw = np.sort([int(plain[y, x, 0]) for x, y in table.coords_l0.tolist()])
    np.testing.assert_array_equal(firsts, raw)
    assert found == int((raw % 2 == 0).sum()) > 0


def fit_and_transform(path: str) -> bool:
    """Runs in a process of its own, see below."""
    with open_slide(path, reader="tiff") as slide:
        transform = fit_stain(slide, None, StainConfig(stain_norm="macenko"))
    return bool(transform(np.zeros((16, 512, 512, 3), np.uint8)).any())


@pytest.mark.check
def test_memory_of_fit_and_transform_does_not_grow_with_the_slide(
    tmp_path: Path,
) -> None:
    peaks = []
    for edge in (3000, 6000):
        path = tmp_path / f"{edge}.svs"
        write_he_slide(path, (edge, edge))
        found = run_and_measure(
            "tests.tiles.test_transforms", "fit_and_transform", path=str(path)
        )
        peaks.append(found.growth_bytes)
    reader_bytes, tiles_bytes = 72 * MIB, 12 * MIB
    assert max(peaks) < 40 * MIB + reader_bytes + tiles_bytes
    assert peaks[1] - peaks[0] < 24 * MIB
