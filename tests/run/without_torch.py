"""Work without torch, each in a fresh process; returns the heavy packages that it imported."""

import sys
from pathlib import Path

HEAVY = (
    "torch",
    "scipy",
    "skimage",
    "openvino",
    "timm",
    "transformers",
    "pandas",
    "matplotlib",
)


def heavy() -> list[str]:
    """Heavy packages that this process has imported."""
    return [name for name in HEAVY if name in sys.modules]


def nothing() -> list[str]:
    """The interpreter and NumPy alone."""
    import numpy as np

    np.zeros(1)
    return heavy()


def planned(slide: str, encoder: str) -> tuple[list[str], float, str]:
    """A plan of a known encoder: heavy packages, seconds of encoding, age of the rates."""
    from thinsection.run.plan import plan

    prediction = plan([Path(slide)], encoders=[encoder], batch_size=32)
    return heavy(), prediction.time.encode_s, prediction.rates_note


def tiles_read(slide: str) -> tuple[list[str], int]:
    """All native tiles of a slide."""
    import thinsection as ts

    num_tiles = 0
    with ts.open_slide(slide) as opened:
        table = ts.tile_grid(opened, tile_mpp="native", tile_px=256)
        for batch in ts.iter_tiles(opened, table):
            num_tiles += len(batch.tiles)
    return heavy(), num_tiles


def tissue_found(slide: str) -> tuple[list[str], int]:
    """The mask of tissue."""
    import thinsection as ts

    with ts.open_slide(slide) as opened:
        num_px = int(ts.tissue_mask(opened).mask.sum())
    return heavy(), num_px


def tiles_run(slide: str, out: str) -> tuple[list[str], int]:
    """A run that ends with the tile grid, with its page."""
    import thinsection as ts

    summary = ts.run([slide], out=out, until="tiles")
    return heavy(), summary.counts["done"]


def encoded_by_numpy(slide: str, out: str, tile_mpp: str) -> tuple[list[str], str]:
    """A whole run with an encoder on NumPy; packages, and the engine that the ledger names."""
    import numpy as np

    import thinsection as ts
    from thinsection.encode import NUMPY, EncoderSpec, TileEncoder

    class ColourMeans(TileEncoder):
        """Means of red, green and blue."""

        spec = EncoderSpec(name="colour_means", dim=3)
        device = NUMPY
        precision = "fp32"

        def encode(self, tiles_u8):  # type: ignore[no-untyped-def]
            means = tiles_u8.mean(axis=(1, 2), dtype=np.float64) / 255
            return means.astype(np.float32)

    encoder = ColourMeans()
    ts.run([slide], out=out, encoder=encoder, tile_mpp=tile_mpp)
    return heavy(), encoder.engine


def pooled(folder: str) -> tuple[list[str], int]:
    """Slide embeddings of stored tile embeddings."""
    from thinsection.cli.main import main

    sys.argv = ["thinsection", "aggregate", folder, "--slide-encoder", "max"]
    try:
        main()
    except SystemExit as end:
        return heavy(), int(end.code or 0)
    return heavy(), 0


def listed(folder: str) -> tuple[list[str], int]:
    """What `thinsection ls` prints."""
    from thinsection.cli.main import main

    sys.argv = ["thinsection", "ls", folder]
    try:
        main()
    except SystemExit as end:
        return heavy(), int(end.code or 0)
    return heavy(), 0


def exported(folder: str, out: str) -> tuple[list[str], int]:
    """Coordinates and embeddings for TRIDENT."""
    from thinsection.cli.main import main

    sys.argv = ["thinsection", "export", "trident", folder, "--out", out]
    try:
        main()
    except SystemExit as end:
        return heavy(), int(end.code or 0)
    return heavy(), 0


def resampled(num_tiles: int) -> tuple[list[str], str]:
    """Tiles of 508 px, reduced to 256 px; packages, and the digest of the reduced tiles."""
    import hashlib

    import numpy as np

    from thinsection.slide.resize import resample

    digest = hashlib.sha256()
    rng = np.random.default_rng(num_tiles)
    out = np.empty((3, 256, 256, 3), np.uint8)
    for _ in range(num_tiles // 3):
        resample(rng.integers(0, 256, (3, 508, 508, 3), dtype=np.uint8), out)
        digest.update(out)
    return heavy(), digest.hexdigest()
