"""HistAI's Hibou-B and Hibou-L: DINOv2 with registers.

Their repositories bring code of their own; the same architecture is in transformers, into which the
weights must fit name by name.
"""

from thinsection.encode.spec import Architecture, EncoderSpec

_MEAN = (0.7068, 0.5755, 0.722)
_STD = (0.195, 0.2316, 0.1816)
_SOURCE = "Nechaev et al. 2024, arXiv:2406.05074"

SPECS = (
    EncoderSpec(
        name="hibou_b",
        dim=768,
        architecture=Architecture(
            kind="transformers",
            model="Dinov2WithRegistersModel",
            options={"patch_size": 14, "image_size": 224, "num_register_tokens": 4},
        ),
        interpolation="bicubic",
        mean=_MEAN,
        std=_STD,
        num_params=85_728_768,
        licence="Apache-2.0",
        source=_SOURCE,
        repo="histai/hibou-b",
        needs=("transformers", "huggingface_hub"),
    ),
    EncoderSpec(
        name="hibou_l",
        dim=1024,
        architecture=Architecture(
            kind="transformers",
            model="Dinov2WithRegistersModel",
            options={
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "patch_size": 14,
                "image_size": 224,
                "num_register_tokens": 4,
            },
        ),
        interpolation="bicubic",
        mean=_MEAN,
        std=_STD,
        num_params=303_233_024,
        licence="Apache-2.0",
        source=_SOURCE,
        repo="histai/hibou-L",
        gated=True,
        needs=("transformers", "huggingface_hub"),
    ),
)
