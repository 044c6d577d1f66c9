"""DINOv2 on natural images: the usual point of comparison."""

from thinsection.encode.spec import Architecture, EncoderSpec


def _dinov2(size: str, dim: int, num_params: int) -> EncoderSpec:
    model = f"vit_{size}_patch14_dinov2"
    return EncoderSpec(
        name=f"dinov2_vit{size[0]}14",
        dim=dim,
        # the published position table is that of 518 px; it is interpolated to the 224 px grid
        architecture=Architecture(kind="timm", model=model, options={"dynamic_img_size": True}),
        tile_mpp=None,
        interpolation="bicubic",
        num_params=num_params,
        licence="Apache-2.0",
        source="Oquab et al. 2023, arXiv:2304.07193; natural images",
        repo=f"timm/{model}.lvd142m",
        needs=("timm", "huggingface_hub"),
    )


SPECS = (
    _dinov2("small", 384, 22_056_192),
    _dinov2("base", 768, 86_579_712),
    _dinov2("large", 1024, 304_367_616),
    _dinov2("giant", 1536, 1_136_479_232),
)
