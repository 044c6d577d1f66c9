"""Owkin's Phikon (iBOT ViT-B/16) and Phikon-v2 (DINOv2 ViT-L/16)."""

from thinsection.encode.spec import Architecture, EncoderSpec

SPECS = (
    EncoderSpec(
        name="phikon",
        dim=768,
        architecture=Architecture(kind="transformers", model="ViTModel"),
        num_params=85_798_656,
        licence="Owkin non-commercial",
        source="Filiot et al. 2023, doi:10.1101/2023.07.21.23292757",
        repo="owkin/phikon",
        needs=("transformers", "huggingface_hub"),
    ),
    EncoderSpec(
        name="phikon_v2",
        dim=1024,
        architecture=Architecture(
            kind="transformers",
            model="Dinov2Model",
            options={
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "patch_size": 16,
                "image_size": 224,
            },
        ),
        num_params=303_351_808,
        licence="Owkin non-commercial",
        source="Filiot et al. 2024, arXiv:2409.09173",
        repo="owkin/phikon-v2",
        needs=("transformers", "huggingface_hub"),
    ),
)
