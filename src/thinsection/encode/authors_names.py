"""Weights of a checkpoint, renamed from its authors' names to those of our network."""

from types import SimpleNamespace
from typing import Any

from thinsection.encode import musk, networks, towers
from thinsection.encode.registry import EncoderSpec
from thinsection.weights.files import StateDict
from thinsection.weights.placement import optional_package

# In the checkpoint of iSight, CLIP stands beside heads for tasks and for texts. Its weights are
# under this name.
_ISIGHT_CLIP = "patch_encoder."
_ISIGHT_UNUSED = (
    *towers.TEXT_NAMES,
    "classifiers.",
    "attention_net.",
    "cell_type_projection.",
    "text_projection_to_visual_dim.",
)

Foreign = Any  # a network of timm, which has no types


def under_our_names(
    spec: EncoderSpec, network: Foreign, state: StateDict
) -> tuple[StateDict, tuple[str, ...]]:
    """Weights under the names of this network, and how names begin that it does not need.

    Args:
        spec: declaration of the encoder.
        network: the network that will get the weights.
        state: weights under their authors' names.
    """
    kind = spec.architecture.kind
    if spec.has_text_tower:
        return towers.in_open_clip_names(state), towers.TEXT_NAMES
    if kind == "isight":
        bare = {name.removeprefix(_ISIGHT_CLIP): x for name, x in state.items()}
        return towers.in_open_clip_names(bare), _ISIGHT_UNUSED
    # a checkpoint may have a classifier, which an encoder does not use
    published = getattr(network, "pretrained_cfg", {})
    names = published.get("classifier") or ()
    if isinstance(names, str):
        names = (names,)
    unused = [networks.CLASSIFIER, *(f"{name}." for name in names)]
    if kind == "musk":
        unused += musk.UNUSED
    if kind in ("timm", "musk"):
        state = _in_timm_names(network, state)
    return state, tuple(unused)


def _in_timm_names(network: Foreign, state: StateDict) -> StateDict:
    """Weights of DINOv2's or BEiT-3's own code under timm's names; others as they are.

    timm would also fit a position table of another size. It sees no table of the network, so this
    table stays as it is, and is refused as any other weights of a wrong shape.
    """
    is_beit3 = any(name.startswith("beit3.") for name in state)
    if not is_beit3 and "mask_token" not in state:
        return state
    convert = optional_package("timm").models.vision_transformer.checkpoint_filter_fn
    without_table = SimpleNamespace(patch_embed=network.patch_embed, pos_embed=None)
    renamed: StateDict = convert(dict(state), without_table)
    # timm's own BEiT-3 ends with the norm of another pooling
    return {
        name.replace("layer_norm.", "norm.", 1) if is_beit3 else name: tensor
        for name, tensor in renamed.items()
    }
