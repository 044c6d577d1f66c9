"""Runs another tool's command with a plain softmax in the place of prov-gigapath's FlashAttention.

`python -m benchmarks.plain_flash COMMAND`: what the command would give if FlashAttention ran here.
TRIDENT's check for the package flash_attn, and the assertion of prov-gigapath, are passed by.
"""

import importlib
import sys

from tests.support.plain_flash import plain_attention

from thinsection.rescue.command import run_command
from thinsection.rescue.gigapath import _trident_without_flash
from thinsection.weights.placement import optional_package

if __name__ == "__main__":
    optional_package("timm")
    importlib.import_module("gigapath.slide_encoder")
    attention = importlib.import_module("torchscale.component.multihead_attention")
    vars(attention)["flash_attn_func"] = plain_attention
    with _trident_without_flash():
        sys.exit(run_command(sys.argv[1:]))
