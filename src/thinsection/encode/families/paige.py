"""Paige's Virchow and Virchow2: class token and mean of the patch tokens, 2560-d."""

from thinsection.encode.spec import Architecture, EncoderSpec

_OPTIONS = {
    "img_size": 224,
    "init_values": 1e-5,
    "mlp_ratio": 5.3375,
    "global_pool": "",
    "dynamic_img_size": True,
    "mlp_layer": "SwiGLUPacked",
    "act_layer": "SiLU",
}

SPECS = (
    EncoderSpec(
        name="virchow",
        dim=2560,
        architecture=Architecture(kind="timm", model="vit_huge_patch14_224", options=_OPTIONS),
        interpolation="bicubic",
        pooling="cls_mean",
        num_params=631_229_184,
        licence="Apache-2.0",
        source="Vorontsov et al. 2024, doi:10.1038/s41591-024-03141-0",
        repo="paige-ai/Virchow",
        gated=True,
        needs=("timm", "huggingface_hub"),
    ),
    EncoderSpec(
        name="virchow2",
        dim=2560,
        architecture=Architecture(
            kind="timm", model="vit_huge_patch14_224", options={**_OPTIONS, "reg_tokens": 4}
        ),
        interpolation="bicubic",
        pooling="cls_mean",
        num_params=631_239_424,
        licence="CC-BY-NC-ND-4.0",
        source="Zimmermann et al. 2024, arXiv:2408.00738",
        repo="paige-ai/Virchow2",
        gated=True,
        needs=("timm", "huggingface_hub"),
    ),
)
