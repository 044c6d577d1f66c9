"""Bioptimus' H-optimus-0, H-optimus-1 and the distilled H0-mini."""

from thinsection.encode.spec import Architecture, EncoderSpec

_MEAN = (0.707223, 0.578729, 0.703617)
_STD = (0.211883, 0.230117, 0.177517)
_GIANT = Architecture(
    kind="timm",
    model="vit_giant_patch14_reg4_dinov2",
    options={"img_size": 224, "init_values": 1e-5, "global_pool": "token"},
)
_MINI = Architecture(
    kind="timm",
    model="vit_base_patch14_reg4_dinov2",
    options={
        "img_size": 224,
        "init_values": 1e-5,
        "mlp_ratio": 2.66667 * 2,
        "mlp_layer": "SwiGLUPacked",
        "act_layer": "SiLU",
        "global_pool": "",
    },
)

SPECS = (
    EncoderSpec(
        name="h_optimus_0",
        dim=1536,
        architecture=_GIANT,
        interpolation="bicubic",
        mean=_MEAN,
        std=_STD,
        num_params=1_134_774_272,
        licence="Apache-2.0",
        source="Saillard et al. 2024, github.com/bioptimus/releases",
        repo="bioptimus/H-optimus-0",
        gated=True,
        needs=("timm", "huggingface_hub"),
    ),
    EncoderSpec(
        name="h_optimus_1",
        dim=1536,
        architecture=_GIANT,
        interpolation="bicubic",
        mean=_MEAN,
        std=_STD,
        num_params=1_134_774_272,
        licence="CC-BY-NC-ND-4.0",
        source="Bioptimus 2025, model card of H-optimus-1",
        repo="bioptimus/H-optimus-1",
        gated=True,
        needs=("timm", "huggingface_hub"),
    ),
    EncoderSpec(
        name="h0_mini",
        dim=1536,
        architecture=_MINI,
        interpolation="bicubic",
        mean=_MEAN,
        std=_STD,
        pooling="cls_mean",
        num_params=85_739_520,
        licence="CC-BY-NC-ND-4.0",
        source="Filiot et al. 2025, arXiv:2501.16239",
        repo="bioptimus/H0-mini",
        gated=True,
        needs=("timm", "huggingface_hub"),
    ),
)
