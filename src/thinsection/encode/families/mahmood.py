"""Mahmood Lab's tile encoders: UNI, UNI2-h and CONCH v1.5."""

from thinsection.encode.spec import Architecture, EncoderSpec

_LICENCE = "CC-BY-NC-ND-4.0"

SPECS = (
    EncoderSpec(
        name="uni",
        dim=1024,
        architecture=Architecture(
            kind="timm",
            model="vit_large_patch16_224",
            options={"img_size": 224, "init_values": 1e-5, "dynamic_img_size": True},
        ),
        tile_px=256,
        num_params=303_350_784,
        licence=_LICENCE,
        source="Chen et al. 2024, doi:10.1038/s41591-024-02857-3",
        repo="MahmoodLab/UNI",
        gated=True,
        needs=("timm", "huggingface_hub"),
    ),
    EncoderSpec(
        name="uni2_h",
        dim=1536,
        architecture=Architecture(
            kind="timm",
            model="vit_giant_patch14_224",
            options={
                "img_size": 224,
                "patch_size": 14,
                "depth": 24,
                "num_heads": 24,
                "init_values": 1e-5,
                "embed_dim": 1536,
                "mlp_ratio": 2.66667 * 2,
                "no_embed_class": True,
                "mlp_layer": "SwiGLUPacked",
                "act_layer": "SiLU",
                "reg_tokens": 8,
                "dynamic_img_size": True,
            },
        ),
        tile_px=256,
        num_params=681_394_176,
        licence=_LICENCE,
        source="Chen et al. 2024, doi:10.1038/s41591-024-02857-3; model card of UNI2-h",
        repo="MahmoodLab/UNI2-h",
        gated=True,
        needs=("timm", "huggingface_hub"),
    ),
    EncoderSpec(
        name="conch_v15",
        dim=768,
        architecture=Architecture(kind="conch_v15", model="conch_v15"),
        tile_px=512,
        input_px=448,
        resize_px=448,
        pooling="head",
        num_params=306_109_184,
        licence=_LICENCE,
        source="Ding et al. 2024, arXiv:2411.19666",
        repo="MahmoodLab/TITAN",
        revision="dac6773d9961cfc75503440676ff157a2c6e8d2e",
        weights_files=("conch_v1_5_pytorch_model.bin",),
        gated=True,
        needs=("huggingface_hub",),
    ),
)
