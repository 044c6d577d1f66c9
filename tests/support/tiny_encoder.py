"""A vision transformer of a few small layers, which is built and compiled in seconds."""

from thinsection.encode.registry import Architecture, EncoderSpec


def tiny_spec(*, width: int, layers: int) -> EncoderSpec:
    """CLIP's vision network for tiles of 80 px, which it sees as 64 px, in patches of 16 px."""
    return EncoderSpec(
        name="tiny",
        dim=512,
        architecture=Architecture(
            kind="clip",
            model="tiny",
            options={
                "patch_px": 16,
                "image_px": 64,
                "vision": {
                    "width": width,
                    "layers": layers,
                    "heads": 2,
                    "quick_gelu": False,
                },
            },
        ),
        pooling="head",
        supports_tokens=True,
        input_px=64,
        tile_px=80,
    )
