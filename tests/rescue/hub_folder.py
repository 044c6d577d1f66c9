"""The stand-in TITAN as a folder of the Hugging Face hub, with its own remote code."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.rescue.stand_in import DIM, NUM_BLOCKS, Titan

_MODELING = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from tests.rescue.stand_in import Titan as StandIn


class TitanConfig(PretrainedConfig):
    model_type = "titan_stand_in"

    def __init__(self, dim=48, num_blocks=2, **others):
        super().__init__(**others)
        self.dim = dim
        self.num_blocks = num_blocks


class Titan(StandIn, PreTrainedModel):
    config_class = TitanConfig

    def __init__(self, config, **_):
        PreTrainedModel.__init__(self, config)
        self.vision_encoder = StandIn(config.dim, config.num_blocks).vision_encoder
        self.post_init()

    def encode_slide_from_patch_features(self, features, coords, size):
        states = StandIn.encode_slide_from_patch_features(self, features, coords, size)
        return states[:, 0]  # the class token's

    def return_conch(self):
        return torch.nn.Identity(), None

    def _init_weights(self, module):
        pass
"""


def write_titan(folder: Path, *, dim: int = DIM, num_blocks: int = NUM_BLOCKS) -> Path:
    """Folder that `AutoModel.from_pretrained(..., trust_remote_code=True)` loads."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    weights = Titan(dim, num_blocks).state_dict()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "dim": dim,
        "num_blocks": num_blocks,
        "architectures": ["Titan"],
        "model_type": "titan_stand_in",
        "auto_map": {
            "AutoConfig": "modeling_titan.TitanConfig",
            "AutoModel": "modeling_titan.Titan",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_titan.py").write_text(_MODELING)
    return folder
