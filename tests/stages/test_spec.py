"""What settings come to, once; and how it travels."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import (
    BudgetError,
    ConfigError,
    ThinsectionError,
    UnknownEncoderError,
)
from thinsection.slide.annotations import RegionsConfig
from thinsection.stages.config import EncodeConfig, QcConfig, RunConfig
from thinsection.stages.spec import check_run, notes_on_tiles, resolve
from thinsection.tiles import TilesConfig
from thinsection.tiles.budget import StreamConfig
from thinsection.types import GIB, MIB


@pytest.mark.parametrize(
    ("until", "encoders", "pooled"),
    [
        ("tissue", (), ()),
        ("tiles", (), ()),
        ("embeddings", ("efficientnet_lite0",), ()),
        ("slide-embeddings", ("efficientnet_lite0",), ("mean",)),
    ],
)
def test_a_run_has_the_models_that_it_needs(
    until: str, encoders: tuple[str, ...], pooled: tuple[str, ...]
) -> None:
    spec = resolve(RunConfig(), {"until": until})
    assert spec.output.until == until
    assert spec.encoding.encoders == encoders
    assert spec.encoding.slide_encoders == pooled


def test_single_settings_win_and_the_record_has_all_of_them() -> None:
    config = RunConfig(encode=EncodeConfig(seed=3))
    spec = resolve(
        config, {"until": "tiles", "tile_px": 512, "aggregate_memory": "2GiB"}
    )
    assert spec.tiles.tile_px == 512
    assert spec.encoding.seed == 3
    assert spec.encoding.pooling_bytes == 2 * GIB
    assert as_mapping(spec)["output"]["until"] == "tiles"
    assert as_mapping(spec)["tiles"]["tile_px"] == 512
    assert as_mapping(spec)["encode"]["seed"] == 3
    assert RunConfig().tiles.tile_px == 256  # the configuration is left as it was


def test_what_cannot_be_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"until must be one of tissue, qc, .*'all'"):
        resolve(RunConfig(), {"until": "all"})
    with pytest.raises(ConfigError, match="unknown setting 'tile_pxx'; did you mean"):
        resolve(RunConfig(), {"until": "tiles", "tile_pxx": 3})
    with pytest.raises(UnknownEncoderError, match="'efficientnet'"):
        resolve(RunConfig(), {"until": "embeddings", "encoders": ["efficientnet"]})
    with pytest.raises(UnknownEncoderError, match="'meen'; did you mean 'mean'"):
        resolve(RunConfig(), {"slide_encoders": ["meen"]})
    resolve(
        RunConfig(), {"until": "tiles", "encoders": ["efficientnet"]}
    )  # nobody asks for it


def test_a_wrong_value_is_refused_also_where_the_run_does_not_come_to_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "rules.toml").write_text("[[rule]]\nmisspelt = 1\n")
    wrong = [
        ({"graph": "knn:none"}, "knn:none"),
        ({"segmenters": ("no-such-network",)}, "no-such-network"),
        ({"qc_rules": tmp_path / "rules.toml"}, "rules.toml"),
    ]
    for overrides, named in wrong:
        spec = resolve(RunConfig(), {"until": "tissue", **overrides})
        with pytest.raises(ThinsectionError, match=named):
            check_run(spec)


def test_tissue_has_one_origin() -> None:
    drawn = RegionsConfig(tissue="drawn")
    resolve(RunConfig(regions=drawn), {"until": "tiles"})
    with pytest.raises(
        ConfigError,
        match=r"tissue and qc exclude each other.*'auto'; drop one of them",
    ):
        resolve(RunConfig(regions=drawn, qc=QcConfig(qc="auto")), {"until": "tiles"})
    both = {"segmenters": ["hest-tissue"], "tissue_segmenter": True}
    with pytest.raises(ConfigError, match="tissue and tissue_segmenter exclude"):
        resolve(RunConfig(regions=drawn), both | {"until": "tiles"})
    with pytest.raises(ConfigError, match="tissue_segmenter and qc exclude"):
        resolve(RunConfig(), both | {"until": "tiles", "qc": "auto"})


def test_a_batch_has_the_wanted_size_or_the_devices_as_far_as_memory_holds_it() -> None:
    spec = resolve(RunConfig(), {"until": "embeddings"})
    assert spec.batch_size(on_gpu=False) == 32
    assert spec.batch_size(on_gpu=True) == 256
    small = replace(spec, stream=StreamConfig(memory="64MiB"))
    assert small.batch_size(on_gpu=False) == 32
    assert small.batch_size(on_gpu=True) == 32 * MIB // (3 * 256 * 256 * 3) < 256
    least = replace(spec, stream=StreamConfig(memory="40MiB"))
    assert least.batch_size(on_gpu=False) == 8 * MIB // (3 * 256 * 256 * 3) < 32
    assert (
        resolve(RunConfig(), {"until": "embeddings", "batch_size": 7}).batch_size(
            on_gpu=True
        )
        == 7
    )
    assert spec.stream_budget(32).batch_bytes == 32 * 256 * 256 * 3
    with pytest.raises(BudgetError):
        small.stream_budget(256)
    assert spec.stream.memory == "2GiB"


def test_files_that_models_are_named_by_are_those_that_are_set() -> None:
    plain = resolve(RunConfig())
    assert plain.encoding.named_files == ("efficientnet_lite0",)
    files = {
        "weights": "w.pth",
        "slide_weights": "s.safetensors",
        "stain_norm": "macenko",
        "stain_reference": "r.svs",
    }
    named = resolve(RunConfig(), files).encoding.named_files
    assert named == ("efficientnet_lite0", "w.pth", "s.safetensors", "r.svs")


def test_a_run_travels_by_pickle_and_as_json() -> None:
    settings = {"qc": "auto", "measures": True, "measures_reference": Path("/x")}
    spec = resolve(RunConfig(), settings)
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301
    document = json.loads(json.dumps(as_mapping(spec)))
    assert from_mapping(RunConfig, document) == spec
    assert hash(spec.encoding) == hash(resolve(RunConfig()).encoding)


def test_a_run_says_for_which_tiles_a_declared_encoder_was_made() -> None:
    def notes(*encoders: str, **tiles: object) -> list[str]:
        config = RunConfig(
            encode=EncodeConfig(encoders=encoders), tiles=TilesConfig(**tiles)
        )
        return notes_on_tiles(config)

    assert notes("uni2_h") == []
    assert notes("uni2_h", tile_mpp="0.51") == []  # within the tolerance of levels
    assert notes("uni2_h", tile_mpp="0.25") == [
        "uni2_h was made for tiles of 256 px at 0.5 µm/px; yours are 256 px at 0.25 µm/px, and "
        "the network sees 224 px"
    ]
    (px,) = notes("virchow2", tile_px=256)
    assert "tiles of 224 px at 0.5 µm/px; yours are 256 px at 0.5 µm/px" in px
    # one line for each encoder and grid, also by another tool's name and at another commit
    several = notes("uni2_h", "uni_v1", "plip@main", tile_mpp=("0.5", "1"))
    assert [line.split()[0] for line in several] == ["uni2_h", "uni"]
    assert all("yours are 256 px at 1 µm/px" in line for line in several)
    # encoders for any tiles, undeclared ones, and a resolution that only the slide knows
    assert notes("efficientnet_lite0", "timm:resnet18", tile_px=64) == []
    assert notes("uni2_h", tile_mpp="native") == []
