"""Lunit's DINO ViT-S with 8 and 16 px patches (as re-published for timm)."""

from thinsection.encode.spec import Architecture, EncoderSpec


def _lunit(name: str, model: str, num_params: int) -> EncoderSpec:
    return EncoderSpec(
        name=name,
        dim=384,
        architecture=Architecture(kind="timm", model=model),
        interpolation="bicubic",
        mean=(0.70322989, 0.53606487, 0.66096631),
        std=(0.21716536, 0.26081574, 0.20723464),
        num_params=num_params,
        licence="Lunit non-commercial",
        source="Kang et al. 2023, arXiv:2212.04690",
        repo=f"1aurent/{model}.lunit_dino",
        needs=("timm", "huggingface_hub"),
    )


SPECS = (
    _lunit("lunit_vits16", "vit_small_patch16_224", 21_665_664),
    _lunit("lunit_vits8", "vit_small_patch8_224", 21_670_272),
)
