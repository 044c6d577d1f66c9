"""The stand-in TITAN as a folder of the Hugging Face hub, with its own remote code."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.rescue.stand_in import Titan

_MODELING = """
from transformers import PretrainedConfig, PreTrainedModel
from tests.rescue.stand_in import Titan as StandIn


class TitanConfig(PretrainedConfig):
    model_type = "titan_stand_in"


class Titan(StandIn, PreTrainedModel):
    config_class = TitanConfig

    def __init__(self, config, **_):
        PreTrainedModel.__init__(self, config)
        self.vision_encoder = StandIn().vision_encoder
        self.post_init()

    def _init_weights(self, module):
        pass
"""


def write_titan(folder: Path) -> Path:
    """Folder that `AutoModel.from_pretrained(..., trust_remote_code=True)` loads."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    save_file(Titan().state_dict(), folder / "model.safetensors", {"format": "pt"})
    config = {
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
