"""Declared encoders with two of their layers: built and run in a tenth of the time.

What a test proves of one layer of a kind (tokens, pooling, precision, tracing) holds for the rest,
which are the same.
"""

from dataclasses import replace

from thinsection.encode import NetworkTileEncoder
from thinsection.encode.backbone import build_backbone
from thinsection.encode.registry import EncoderSpec
from thinsection.encode.specs import find_spec
from thinsection.weights.origin import Origin
from thinsection.weights.placement import place

NUM_LAYERS = 2
# option that says how many layers a kind has; timm's convolutional networks have none
_OPTIONS = {
    "timm": "depth",
    "musk": "depth",
    "conch_v15": "depth",
    "transformers": "num_hidden_layers",
}


def few_layers_spec(name: str) -> EncoderSpec:
    """Declaration of an encoder with two layers; kinds of another form stay as they are."""
    spec = find_spec(name)
    architecture = spec.architecture
    option = _OPTIONS.get(architecture.kind)
    if option is None or "resnet" in architecture.model:
        return spec
    options = {**architecture.options, option: NUM_LAYERS}
    return replace(
        spec, architecture=replace(architecture, options=options), num_params=None
    )


def few_layers(name: str, precision: str, *, seed: int = 0) -> NetworkTileEncoder:
    """Encoder on the CPU with seeded random weights, of two layers."""
    spec = few_layers_spec(name)
    backbone = build_backbone(spec, seed=seed)
    return NetworkTileEncoder(
        spec, backbone, place("cpu", precision), Origin(seed=seed)
    )
