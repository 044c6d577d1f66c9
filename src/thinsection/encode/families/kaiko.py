"""Kaiko's first pathology models (as re-published for timm) and Midnight-12k."""

from thinsection.encode.spec import HALF, Architecture, EncoderSpec

_SUFFIX = ".kaiko_ai_towards_large_pathology_fms"


def _kaiko(name: str, model: str, dim: int, num_params: int) -> EncoderSpec:
    return EncoderSpec(
        name=name,
        dim=dim,
        architecture=Architecture(kind="timm", model=model, options={"dynamic_img_size": True}),
        tile_px=256,
        mean=HALF,
        std=HALF,
        num_params=num_params,
        licence="Kaiko non-commercial",
        source="Aben et al. 2024, arXiv:2404.15217",
        repo=f"1aurent/{model}{_SUFFIX}",
        needs=("timm", "huggingface_hub"),
    )


SPECS = (
    _kaiko("kaiko_vits16", "vit_small_patch16_224", 384, 21_665_664),
    _kaiko("kaiko_vits8", "vit_small_patch8_224", 384, 21_670_272),
    _kaiko("kaiko_vitb16", "vit_base_patch16_224", 768, 85_798_656),
    _kaiko("kaiko_vitb8", "vit_base_patch8_224", 768, 85_807_872),
    _kaiko("kaiko_vitl14", "vit_large_patch14_reg4_dinov2", 1024, 304_370_688),
    EncoderSpec(
        name="midnight_12k",
        dim=3072,
        architecture=Architecture(
            kind="transformers",
            model="Dinov2Model",
            options={
                "hidden_size": 1536,
                "num_hidden_layers": 40,
                "num_attention_heads": 24,
                "patch_size": 14,
                "image_size": 224,
                "use_swiglu_ffn": True,
            },
        ),
        mean=HALF,
        std=HALF,
        pooling="cls_mean",
        num_params=1_134_771_200,
        licence="MIT",
        source="Karasikov et al. 2025, arXiv:2504.05186",
        repo="kaiko-ai/midnight",
        needs=("transformers", "huggingface_hub"),
    ),
)
