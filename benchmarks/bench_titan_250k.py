"""Does a TITAN block of 250,000 tiles run in 2 GiB? Some half an hour on one core.

With bfloat16 products, which are faster where a CPU has them; bias, softmax, states are float32.
A dense bias would take 12 x 250,000² x 4 bytes = 3 TB.
"""

from benchmarks.harness import arguments, finish
from benchmarks.titan_inputs import measured
from thinsection.types import GIB

FULL, SMOKE = 250_000, 600


def main() -> None:
    """One of the six blocks, from tile embeddings to the pooled vector."""
    args = arguments(__doc__ or "")
    num_tiles = SMOKE if args.smoke else FULL
    row = measured(num_tiles, "bf16", blocks=1, budget_bytes=2 * GIB)
    dense_gib = 12 * num_tiles**2 * 4 / GIB
    finish("bench_titan_250k", {**row, "dense_bias_gib": dense_gib}, args)


if __name__ == "__main__":
    main()
