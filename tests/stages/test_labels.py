"""Names of results: a person reads them, and different settings never share one."""

import re
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinsection.pool import SlideEncoder, load_slide_encoder
from thinsection.pool.encoder import slide_encoder_identity
from thinsection.qc import load_pipeline
from thinsection.qc.pipeline import Pipeline, preset_names
from thinsection.qc.tissue import TissueConfig
from thinsection.slide.readers import reader_choices
from thinsection.stages.checks import QcStage
from thinsection.stages.features import FeaturesStage
from thinsection.stages.labels import grid_label, join_label, slug, variant
from thinsection.stages.leaves import (
    FormatStage,
    GraphStage,
    OverviewStage,
    PoolingStage,
)
from thinsection.stages.masks import TissueStage
from thinsection.stages.stage import Stage
from thinsection.stages.tiles import TilesStage
from thinsection.store.identity import Source
from thinsection.tiles.grid import TilesConfig
from thinsection.tiles.transforms import StainConfig, StainStatistics, stain_target
from thinsection.weights.origin import Origin

# few values, hostile ones among them: two random settings are often almost the same
WORDS = st.sampled_from(
    [
        *(
            "tissue",
            "contrast",
            "a",
            "b",
            "a+b",
            "a_b",
            "a-b",
            "a b",
            "a/b",
            "A",
            "none",
            "",
        ),
        *("x_edge-pad", "x_tiff", "edge-pad", "x", "é", "x-6d6b3b", "0.5", "None"),
    ]
)
MPPS = st.sampled_from(
    ["0.5", "0.50", ".5", "0.25", "1", "1.0", "native", "0.5000001", "1e-3"]
)
GRIDS = st.builds(
    TilesConfig,
    tile_px=st.sampled_from([256, 512]),
    tile_mpp=MPPS,
    overlap=st.sampled_from([0, 32]),
    min_tissue_fraction=st.sampled_from([0.5, 0.05, 0, 1, 1.0]),
    tile_filter=st.lists(WORDS, max_size=3).map(tuple),
    edge=st.sampled_from(["drop", "pad"]),
)
TISSUES = st.builds(
    TissueConfig,
    mask_mpp=st.sampled_from([8.0, 8, 4.0, 4.0000001]),
    min_speck_um2=st.sampled_from([20_000.0, 20_000, 1.0]),
    black_level=st.sampled_from([30, 0]),
)
MASKS = st.builds(TissueStage, config=TISSUES, reader=st.sampled_from(reader_choices()))
STAINS = st.builds(
    StainConfig,
    stain_norm=st.sampled_from(["macenko", "reinhard"]),
    stain_reference=st.none() | WORDS,
    stain_mpp=st.sampled_from([1.0, 1, 2.0]),
)


def tiles(config: TilesConfig, mask: TissueStage | QcStage | None = None) -> TilesStage:
    return TilesStage(config=config, mask=mask or TissueStage(config=TissueConfig()))


def features(stage: TilesStage | None = None, **changes: Any) -> FeaturesStage:
    return FeaturesStage(
        **{
            **{"tiles": stage or tiles(TilesConfig()), "encoder": "uni2_h"},
            **{"identity": {"name": "uni2_h", "weights_hash": "ab"}, **changes},
        }
    )


def plain(config: Any) -> dict[str, Any]:
    """What of the settings decides: '0.50' is '0.5' and 8 is 8.0."""
    values = asdict(config)
    return values | (
        {"tile_mpp": config.mpp} if isinstance(config, TilesConfig) else {}
    )


@given(GRIDS, GRIDS, MASKS, MASKS)
def test_two_grids_share_a_name_only_where_nothing_differs(
    one: TilesConfig, other: TilesConfig, mask: TissueStage, second: TissueStage
) -> None:
    a, b = tiles(one, mask), tiles(other, second)
    same = (plain(one), plain(mask.config), mask.reader) == (
        *(plain(other), plain(second.config), second.reader),
    )
    assert (a.grid == b.grid) == same
    assert (a.address == b.address) == (
        a.key(Source(key="pixels")) == b.key(Source(key="pixels"))
    )


@given(GRIDS, st.data())
def test_one_changed_setting_changes_the_name(
    config: TilesConfig, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([f.name for f in fields(TilesConfig)]))
    changed = replace(config, **{name: getattr(data.draw(GRIDS), name)})
    same = plain(config) == plain(changed)
    assert (grid_label(config, "") == grid_label(changed, "")) == same


@given(STAINS, STAINS)
def test_two_normalisations_share_a_name_only_where_nothing_differs(
    one: StainConfig, other: StainConfig
) -> None:
    target = stain_target(StainConfig(stain_norm="macenko"))
    a, b = (features(stain=stain, target=target) for stain in (one, other))
    assert (a.label == b.label) == (plain(one) == plain(other))
    assert (a.address == b.address) == (
        a.key(Source(key="pixels")) == b.key(Source(key="pixels"))
    )


@given(GRIDS, MASKS, STAINS)
def test_a_name_is_short_and_of_letters_that_every_file_system_takes(
    grid: TilesConfig, mask: TissueStage, stain: StainConfig
) -> None:
    target = stain_target(StainConfig(stain_norm="macenko"))
    address = features(tiles(grid, mask), stain=stain, target=target).address
    for part in address.split("/"):
        assert re.fullmatch(r"[\w.+-]+", part)
        assert not part.startswith((".", "-"))
        assert len(part.encode()) <= 220
    assert address.count("/") == 1


@pytest.mark.parametrize(
    ("config", "mask", "name"),
    [
        (TilesConfig(), "", "256px_0.5mpp"),
        (TilesConfig(tile_px=512, tile_mpp="1"), "", "512px_1mpp"),
        (TilesConfig(tile_mpp="native", overlap=64), "", "256px_native_64px_overlap"),
        (TilesConfig(), "qc-auto", "256px_0.5mpp_qc-auto"),
        (TilesConfig(edge="pad"), "tiff", "256px_0.5mpp_edge-pad_tiff"),
        (
            TilesConfig(tile_filter=("tissue", "contrast")),
            "",
            "256px_0.5mpp_tile_filter-t+c",
        ),
    ],
)
def test_a_grid_is_named_as_a_person_reads_it(
    config: TilesConfig, mask: str, name: str
) -> None:
    assert grid_label(config, mask) == name.replace("t+c", "tissue+contrast")


def test_many_changed_settings_become_a_hash_that_sees_every_one() -> None:
    many = TilesConfig(tile_filter=tuple(f"filter{n}" for n in range(9)))
    names = {
        grid_label(many, ""),
        grid_label(replace(many, min_tissue_fraction=0.1), ""),
    }
    assert len(names) == 2
    assert all(re.fullmatch(r"256px_0\.5mpp_[0-9a-f]{6}", name) for name in names)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((("a", "b"), "a+b"), ((), "none"), ("a b/c:d", "a-b-c-d"), ("..", "..")),
        *(
            (0.5, "0.5"),
            (8.0, "8"),
            (0.1 + 0.2, "0.30000000000000004"),
            (":", "x"),
            (None, "None"),
        ),
    ],
)
def test_a_value_is_a_part_of_a_name(value: object, text: str) -> None:
    assert slug(value) == text


def test_defaults_add_nothing_to_a_name() -> None:
    assert variant(TilesConfig()) == variant(TissueConfig(mask_mpp=8)) == ""
    assert join_label("a", "", "b") == "a_b"


def test_what_does_not_normalise_stains_has_one_name() -> None:
    odd = StainConfig(stain_places=8)  # of a normalisation that is off
    assert features(stain=odd).address == features().address
    assert features(stain=odd).key(Source(key="p")) == features().key(Source(key="p"))


def test_every_kind_of_stage_has_an_address_of_its_own() -> None:
    grid, one = tiles(TilesConfig()), features()
    target: StainStatistics = stain_target(StainConfig(stain_norm="macenko"))
    stages: list[Stage] = [
        *(grid.mask, grid, one, features(dtype="float16"), features(encoder="uni")),
        features(stain=StainConfig(stain_norm="macenko"), target=target),
        *(OverviewStage(tiles=grid), GraphStage(tiles=grid, spec="knn:8")),
        *(
            GraphStage(tiles=grid, spec="radius:8"),
            FormatStage(features=one, format="tsv"),
        ),
        FormatStage(features=one, format="parquet"),
    ]
    assert len({stage.address for stage in stages}) == len(stages)


def test_the_weights_of_an_encoder_are_part_of_the_key_and_its_revision_is_not() -> (
    None
):
    one = features(identity={"name": "u", "weights_hash": "ab", "revision": "1"})
    moved = features(identity={"name": "u", "weights_hash": "ab", "revision": "2"})
    other = features(identity={"name": "u", "weights_hash": "cd", "revision": "1"})
    assert (
        one.key(Source(key="p"))
        == moved.key(Source(key="p"))
        != other.key(Source(key="p"))
    )
    assert one.address == other.address  # so that a replaced file of weights is refused


def test_the_weights_of_a_slide_encoder_are_part_of_the_key_and_its_revision_is_not() -> (
    None
):
    def pooled(weights_hash: str, revision: str | None) -> str:
        encoder: SlideEncoder = load_slide_encoder("mean", device="cpu")
        encoder.weights_hash, encoder.origin = weights_hash, Origin(revision=revision)
        identity = slide_encoder_identity(encoder)
        return PoolingStage(features=features(), slide_encoder=identity).key(
            Source(key="p")
        )

    assert (
        pooled("ab", "1")
        == pooled("ab", "2")
        == pooled("ab", None)
        != pooled("cd", "1")
    )


@pytest.mark.parametrize("name", preset_names())
def test_presets_of_checks_have_their_own_names(name: str) -> None:
    stage = QcStage(pipeline=load_pipeline(name), source=name)
    assert stage.address == f"slides/qc_{name}"
    assert tiles(TilesConfig(), stage).grid == f"256px_0.5mpp_qc-{name}"


def test_a_preset_with_checks_that_remove_has_a_name_of_its_own() -> None:
    names = set()
    for removes in ((), ("folds",), ("dust", "folds")):
        pipeline = load_pipeline("auto", remove=removes)
        stage = QcStage(pipeline=pipeline, source="auto", removes=removes)
        names.add((stage.name, stage.label))
        assert tiles(TilesConfig(), stage).grid == f"256px_0.5mpp_{stage.label}"
    assert names == {
        ("auto", "qc-auto"),
        ("auto_remove_folds", "qc-auto_remove_folds"),
        ("auto_remove_dust_folds", "qc-auto_remove_dust_folds"),
    }


def test_a_file_of_checks_is_named_by_what_it_says_wherever_it_lies() -> None:
    pipeline = load_pipeline("histoqc-light")
    other: Pipeline = replace(pipeline, work_mpp=pipeline.work_mpp * 2)

    def name(source: str, checks: Pipeline) -> str:
        return QcStage(pipeline=checks, source=source).name

    assert name("a/mine.toml", pipeline) == name("/b/mine.toml", pipeline)
    assert name("a/mine.toml", pipeline) != name("a/mine.toml", other)
    assert name("light.toml", pipeline) not in preset_names()
