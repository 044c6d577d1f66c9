"""Writes `encode/sizes.toml`: `python -m tests.support.network_sizes` (some minutes)."""

from pathlib import Path

import thinsection.encode
from thinsection.encode.counting import count_size
from thinsection.encode.registry import declared_encoders
from thinsection.encode.sizes import NetworkSize

PATH = Path(thinsection.encode.__file__).with_name("sizes.toml")
TILE_PX = 256
HEAD = """# Numbers of each declared encoder's network, from which a plan predicts memory and time.
# `python -m tests.support.network_sizes` writes this file; tests/encode/test_sizes.py counts again.
#
# flops_per_tile   operations of a pass; multiply-adds count as two
# weights_bytes    weights in float32
# pass_bytes       constant part of the peak memory of a pass, in float32
# tile_bytes       further bytes for each tile of 256 px in the network
# is_transformer   true for a vision transformer

"""


def table(name: str, size: NetworkSize) -> str:
    """One table of the file."""
    return (
        f"[{name}]\n"
        f"flops_per_tile = {int(size.flops_per_tile):_}\n"
        f"weights_bytes = {size.weights_bytes:_}\n"
        f"pass_bytes = {size.pass_bytes:_}\n"
        f"tile_bytes = {size.tile_bytes:_}\n"
        f"is_transformer = {str(size.is_transformer).lower()}\n\n"
    )


def main() -> None:
    """Counts all declared encoders."""
    tables = []
    for name, spec in declared_encoders().items():
        tables.append(table(name, count_size(spec, tile_px=TILE_PX)))
    PATH.write_text((HEAD + "".join(tables)).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
