"""Images that are decoded whole are charged to `--memory`: they wait, or are refused."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import thinsection
from thinsection.slide.formats.image_reader import FlatSlide
from thinsection.testing.synthetic import he_texture

SETTINGS: dict[str, Any] = {
    **{"tile_px": 64, "tile_mpp": "native", "batch_size": 4, "pretrained": False},
    **{"overview": False, "decode_threads": 1, "tile_filter": ("contrast",)},
}
MIB = 1 << 20


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Six images of about 4 MiB, with alpha."""
    folder = tmp_path / "images"
    folder.mkdir()
    rgb = np.tile(he_texture(np.random.default_rng(0)), (1, 1, 1))
    rgba = np.dstack([rgb, np.full(rgb.shape[:2], 255, np.uint8)])
    for name in "abcdef":
        Image.fromarray(rgba).save(folder / f"{name}.png", compress_level=1)
    return folder


def held_at_most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of decoded images at once, from now on; one entry more with each that is decoded."""
    held, lock, decode, close = (
        set[FlatSlide](),
        threading.Lock(),
        FlatSlide._decode,
        FlatSlide.close,
    )
    found: list[int] = []

    def decoded(self: FlatSlide) -> Any:
        with lock:
            held.add(self)
            found.append(sum(slide.held_bytes for slide in held))
        return decode(self)

    def closed(self: FlatSlide) -> None:
        with lock:
            held.discard(self)
        close(self)

    monkeypatch.setattr(FlatSlide, "_decode", decoded)
    monkeypatch.setattr(FlatSlide, "close", closed)
    return found


def test_images_wait_until_the_memory_is_free(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = held_at_most(monkeypatch)
    summary = thinsection.run(
        [images],
        out=tmp_path / "out",
        until="tiles",
        memory="42MiB",
        prefetch_slides=4,
        **SETTINGS,
    )
    assert summary.counts["done"] == len(held) == 6
    assert (
        max(held) <= 8 * MIB
    )  # of 42 MiB 32 are scratch, and less than 1 is of batches


def test_an_image_that_can_never_fit_is_refused_with_what_it_needs(
    images: Path, tmp_path: Path
) -> None:
    summary = thinsection.run(
        [images], out=tmp_path / "out", until="tiles", memory="35MiB", **SETTINGS
    )
    assert summary.counts["failed"] == 6
    assert (
        "memory must leave 4.0 MiB for an image that is decoded as a whole, got 2."
        in ((tmp_path / "out" / "failed.csv").read_text())
    )
