"""`rescue.titan()` without a model reaches what others load in its block, and lets go of it."""

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rescue.hub_folder import write_titan
from tests.rescue.test_peers import forbid_bias
from tests.rescue.test_titan import slide

from thinsection import rescue
from thinsection.errors import RescueError
from thinsection.weights.placement import optional_package

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of transformers
]


@pytest.fixture(scope="module", autouse=True)
def remote_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of these tests for the copies that transformers makes of remote code."""
    optional_package("transformers")
    cache = str(tmp_path_factory.mktemp("remote_code"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        patch.syspath_prepend(cache)
        yield
    for name in list(sys.modules):
        if name.partition(".")[0] == "transformers_modules":
            del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_titan(tmp_path_factory.mktemp("hub") / "MahmoodLab" / "TITAN")


def load(folder: Path) -> Any:
    auto = optional_package("transformers").AutoModel
    return auto.from_pretrained(str(folder), trust_remote_code=True)


@torch.inference_mode()
def test_a_model_that_is_loaded_in_the_block_builds_no_bias_and_is_itself_after_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = optional_package("transformers").PreTrainedModel.__dict__[
        "from_pretrained"
    ]
    wanted = load(folder).encode_slide_from_patch_features(*slide())
    with rescue.titan() as nothing, monkeypatch.context() as watched:
        assert nothing is None
        model = load(folder)
        forbid_bias(watched)
        got = model.encode_slide_from_patch_features(*slide())
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
    again = model.encode_slide_from_patch_features(*slide())
    torch.testing.assert_close(again, wanted, rtol=0, atol=0)
    after = optional_package("transformers").PreTrainedModel.__dict__["from_pretrained"]
    assert after is method


@torch.inference_mode()
def test_a_model_that_its_program_drops_is_freed_when_the_next_one_is_loaded(
    folder: Path,
) -> None:
    with rescue.titan():
        first = weakref.ref(load(folder))
        model = load(folder)
        assert first() is None
        model.encode_slide_from_patch_features(*slide())


def test_a_block_without_a_titan_says_what_was_loaded(tmp_path: Path) -> None:
    transformers = optional_package("transformers")
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=16,
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    with (
        pytest.raises(RescueError, match=r"from_pretrained loads .* got ViTModel$"),
        rescue.titan(),
    ):
        transformers.AutoModel.from_pretrained(str(tmp_path))


def test_a_titan_that_is_loaded_but_not_called_is_an_error(folder: Path) -> None:
    with (
        pytest.raises(RescueError, match="use encode_slide_from_patch_features"),
        rescue.titan(),
    ):
        load(folder)


def test_another_revision_is_refused_where_it_is_loaded(
    tmp_path: Path,
) -> None:
    folder = write_titan(tmp_path / "changed")
    modeling = folder / "modeling_titan.py"
    last = "        self.post_init()\n"
    change = "        self.vision_encoder.pos_encode_type = 'abs'\n"
    modeling.write_text(modeling.read_text().replace(last, last + change))
    with (
        pytest.raises(RescueError, match="pos_encode_type must be 'alibi', got 'abs'"),
        rescue.titan(),
    ):
        load(folder)
