"""Makes the fingerprint of the default encoder by timm's network and Pillow's resize.

    thinsection models fingerprint efficientnet_lite0 --tile build/tile.png
    python -m training.encoders.default_fingerprint build/tile.png build/lite0.npy
    thinsection models fingerprint efficientnet_lite0 --embedding build/lite0.npy --port \
        --code "timm 1.0.31: tf_efficientnet_lite0" --who "Thinsection, 2026-11-29" \
        > src/thinsection/encode/fingerprints/efficientnet_lite0.toml

No code of Thinsection embeds the tile here: ours only reads the weights.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from thinsection.encode.backbone import PACKAGED_WEIGHTS, pretrained_backbone
from thinsection.encode.registry import encoder_spec
from thinsection.weights.placement import importable_torchvision


def main() -> None:
    """Writes timm's embedding of a picture."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("tile", type=Path)
    parser.add_argument("embedding", type=Path)
    arguments = parser.parse_args()
    np.save(arguments.embedding, timm_embedding(Image.open(arguments.tile)))


def timm_embedding(picture: Image.Image) -> np.ndarray:
    """Embedding (1280,) of a picture, with the normalisation of timm's own configuration."""
    importable_torchvision()
    import timm

    network = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    ours = pretrained_backbone(encoder_spec("efficientnet_lite0"), PACKAGED_WEIGHTS)
    weights = ours.network.state_dict()
    names = [name for name in network.state_dict() if "classifier" not in name]
    # both list the layers in their order, under names of their own
    renamed = dict(zip(names, weights.values(), strict=True))
    missing = network.load_state_dict(renamed, strict=False).missing_keys
    assert missing == ["classifier.weight", "classifier.bias"], missing
    config = network.pretrained_cfg
    resized = picture.resize((224, 224), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.asarray(resized).copy()).permute(2, 0, 1) / 255
    mean = torch.tensor(config["mean"])[:, None, None]
    std = torch.tensor(config["std"])[:, None, None]
    with torch.no_grad():
        features = network.forward_features(((pixels - mean) / std)[None])
        embedding = network.forward_head(features, pre_logits=True)
    return np.asarray(embedding[0].numpy())


if __name__ == "__main__":
    main()
