"""Prov-GigaPath's tile encoder: DINOv2's giant with 16 px patches."""

from thinsection.encode.spec import Architecture, EncoderSpec

SPECS = (
    EncoderSpec(
        name="gigapath",
        dim=1536,
        architecture=Architecture(
            kind="timm",
            model="vit_giant_patch14_dinov2",
            options={
                "img_size": 224,
                "patch_size": 16,
                "embed_dim": 1536,
                "depth": 40,
                "num_heads": 24,
                "mlp_ratio": 5.33334,
                "init_values": 1e-5,
            },
        ),
        tile_px=256,
        resize_px=256,
        interpolation="bicubic",
        num_params=1_134_953_984,
        licence="Apache-2.0",
        source="Xu et al. 2024, doi:10.1038/s41586-024-07441-w",
        repo="prov-gigapath/prov-gigapath",
        weights_files=("pytorch_model.bin",),
        gated=True,
        needs=("timm", "huggingface_hub"),
    ),
)
