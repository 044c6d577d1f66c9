"""The checks of gpu_proof: what each GPU path gives against the CPU, with the bound that it keeps.

A step takes the device ('cpu' for --smoke) and whether sizes are tiny; it raises where a bound is
broken, and returns figures.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu_inputs import (
    NAMES,
    TILES_PX,
    encoder_on,
    gigapath_of,
    precisions,
    tiles_of,
)
from thinsection.encode.embed import BatchEncoder, pinned_allocator
from thinsection.qc.pipeline import Pipeline
from thinsection.slide import Slide
from thinsection.tiles import TileBatch


def check_queues(device: str, smoke: bool) -> dict[str, Any]:
    """Embeddings through the queues are, to the byte, those of each batch by itself."""
    encoder = encoder_on(device, NAMES[0])
    count, batch = (3, 2) if smoke else (12, 64)
    sizes = [batch] * (count - 1) + [max(1, batch // 3)]
    loop, allocate = BatchEncoder([encoder]), pinned_allocator([encoder])
    free = [allocate((batch, TILES_PX, TILES_PX, 3)) for _ in range(2)]

    def give_back(buffer: np.ndarray) -> None:
        buffer[:] = 255  # who still reads it gets other embeddings
        free.append(buffer)

    found, alone = [], []
    for number, size in enumerate(sizes):
        tiles, buffer, places = tiles_of(size, seed=number), free.pop(), np.arange(size)
        buffer[:size] = tiles
        alone.append(
            encoder.encode(torch.from_numpy(tiles).to(device)).float().cpu().numpy()
        )
        coords = np.stack([places, places], 1)
        release = lambda b=buffer: give_back(b)  # noqa: E731
        made = TileBatch(number, places, coords, buffer[:size], _release=release)
        found += loop.submit(made)
    found += loop.flush()
    for made, one in zip(found, alone, strict=True):
        assert made.tile_embeddings[encoder.label].tobytes() == one.tobytes(), (
            f"batch {made.source} differs"
        )
    return {"batches": count, "equal_bytes": True}


def check_encoders(device: str, smoke: bool) -> dict[str, Any]:
    """Lowest cosine to the CPU's fp32, by precision."""
    tiles, found = tiles_of(2 if smoke else 16), {}
    for name in NAMES[:1] if smoke else NAMES:
        full = encoder_on("cpu", name).encode(tiles)
        for precision in precisions(device):
            got = encoder_on(device, name, precision).encode(tiles).float().cpu()
            cosine = float(F.cosine_similarity(full, got).min())
            assert cosine >= (0.99999 if precision == "fp32" else 0.98), (
                name,
                precision,
                cosine,
            )
            found[f"{name}_{precision}"] = cosine
    return found


def check_attention(device: str, smoke: bool) -> dict[str, Any]:
    """Relative RMS of the chosen kernel and of 'chunked' to float64, forward and backward."""
    from thinsection.attention import alibi2d_attention, alibi_slopes, explain

    tokens, found = (60 if smoke else 1500), {}
    side = int(tokens**0.5) + 1
    cells = torch.stack(
        [torch.arange(tokens) // side, torch.arange(tokens) % side], 1
    ).to(device)
    for dim in (64,) if smoke else (64, 128, 256):
        for precision in precisions(device):
            dtype = {
                "fp32": torch.float32,
                "fp16": torch.float16,
                "bf16": torch.bfloat16,
            }[precision]
            seeded = torch.Generator().manual_seed(dim)
            qkv = [
                torch.randn((1, 4, tokens + 1, dim), generator=seeded).to(device, dtype)
                for _ in range(3)
            ]
            wide = [x.double().cpu() for x in qkv]
            exact = alibi2d_attention(
                *wide, cells.cpu(), alibi_slopes(4), impl="reference"
            )
            for impl in ("auto", "chunked"):
                name = explain(qkv[0], impl=impl).impl
                leaf = [x.clone().requires_grad_() for x in qkv]
                got = alibi2d_attention(*leaf, cells, alibi_slopes(4), impl=impl)
                got.float().square().sum().backward()
                assert all(x.grad.isfinite().all() for x in leaf)
                error = float((got.double().cpu() - exact).norm() / exact.norm())
                assert error <= (2e-6 if precision == "fp32" else 1e-2), (
                    dim,
                    precision,
                    error,
                )
                found[f"{name}_{precision}_{dim}"] = error
    return found


def check_second_card(device: str, smoke: bool) -> dict[str, Any]:
    """Attention and embeddings on 'cuda:1' while 'cuda:0' is current, against 'cuda:0'."""
    from thinsection.attention import alibi2d_attention, alibi_slopes, explain

    if not smoke and torch.cuda.device_count() < 2:
        return {"left_out": "one card only"}
    cards = ("cpu", "cpu") if smoke else ("cuda:0", "cuda:1")
    tokens = 60 if smoke else 1500
    generator = torch.Generator().manual_seed(4)
    qkv = torch.randn((3, 1, 4, tokens + 1, 64), generator=generator)
    cells = torch.stack([torch.arange(tokens) // 40, torch.arange(tokens) % 40], 1)
    tiles = tiles_of(2 if smoke else 64)
    outputs = []
    embeddings = []
    for card in cards:
        q, k, v = qkv.to(card)
        attended = alibi2d_attention(q, k, v, cells.to(card), alibi_slopes(4))
        assert str(attended.device) == card, (attended.device, card)
        outputs.append(attended.cpu())
        embeddings.append(encoder_on(card, NAMES[0]).encode(tiles).float().cpu())
    attention_error = float((outputs[0] - outputs[1]).norm() / outputs[0].norm())
    cosine = float(F.cosine_similarity(embeddings[0], embeddings[1]).min())
    assert attention_error <= 2e-6, attention_error
    assert cosine >= 0.99999, cosine
    impl = explain(qkv[0].to(cards[1])).impl
    return {"impl": impl, "attention_error": attention_error, "cosine": cosine}


def check_slide_encoders(device: str, smoke: bool) -> dict[str, Any]:
    """TITAN and GigaPath: largest difference to the CPU's fp32."""
    from benchmarks.titan_inputs import slide, titan_of

    count = 40 if smoke else 700
    tiles, coords = slide(count)
    wide = np.random.default_rng(2).standard_normal((count, 1536), dtype=np.float32)
    found = {}
    for precision in precisions(device)[::2]:
        made = [
            titan_of(p, device=d) for p, d in (("fp32", "cpu"), (precision, device))
        ]
        one, other = (e.encode(tiles, coords, tile_px_l0=512) for e in made)
        found[f"titan_{precision}"] = float(
            np.abs(one - other).max() / np.abs(one).max()
        )
        layers = 1 if smoke else 4
        made = [
            gigapath_of(d, p, layers) for p, d in (("fp32", "cpu"), (precision, device))
        ]
        one, other = (e.encode(wide, coords, tile_px_l0=512) for e in made)
        found[f"gigapath_{precision}"] = float(
            np.abs(one - other).max() / np.abs(one).max()
        )
    for name, error in found.items():
        assert error <= (1e-3 if name.endswith("fp32") else 0.1), (name, error)
    return found


def check_geometry(device: str, smoke: bool) -> dict[str, Any]:
    """Neighbours and token frames: the same indices and the same bits as on the CPU."""
    from benchmarks.bench_frames import prepare
    from thinsection.frames import nearest_neighbors, token_frame_atoms

    count = 500 if smoke else 20_000
    points = torch.rand(count, 3, generator=torch.Generator().manual_seed(0))
    one, other = (nearest_neighbors(p, k=8) for p in (points, points.to(device)))
    same = float((one.indices == other.indices.cpu()).float().mean())
    torch.testing.assert_close(
        one.distances, other.distances.cpu(), rtol=1e-5, atol=1e-6
    )
    assert same >= 0.9999, same
    batch, positions, mask = prepare(count, False)
    on_device = {k: v.to(device) for k, v in batch.items()}
    frames, valid = token_frame_atoms(batch, positions, mask)
    got, got_valid = token_frame_atoms(on_device, positions.to(device), mask.to(device))
    keep = valid.bool()
    agree = float((valid == got_valid.cpu()).float().mean())
    pairs = list(zip(frames, got, strict=True))
    equal = float(
        torch.stack([(a == b.cpu())[keep].all(-1) for a, b in pairs]).float().mean()
    )
    assert min(agree, equal) >= 0.9999, (agree, equal)
    return {"same_neighbors": same, "same_frames": equal}


def check_qc(device: str, smoke: bool) -> dict[str, Any]:
    """Overlap of the masks that two presets leave, by CuPy and by NumPy.

    HistoQC's runs without `blurry`, which leaves nothing of a generated slide. `auto` also looks at
    a slide with ink, folds, bubbles and dust.
    """
    from training.tuning_slide import tuning_slide

    from thinsection.qc import load_pipeline
    from thinsection.slide import open_slide
    from thinsection.testing.synthetic import write_he_slide

    histoqc, auto = (load_pipeline(name) for name in ("histoqc-default", "auto"))
    checks = tuple(c for c in histoqc.checks if c.kind != "blurry")
    artefacts = tuning_slide(
        8_500, size=(500, 400) if smoke else (3000, 2400), mpp=4.0, stain="he"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_he_slide(
            folder / "a.svs", (3000, 2400) if smoke else (6000, 5000), mpp=0.5
        )
        with open_slide(folder / "a.svs") as slide, artefacts.open() as drawn:
            return {
                "histoqc": _same_masks(
                    slide, replace(histoqc, checks=checks), device, folder
                ),
                "auto": _same_masks(slide, auto, device, folder),
                "auto, artefacts": _same_masks(drawn, auto, device, folder),
            }


def _same_masks(
    slide: Slide, preset: Pipeline, device: str, folder: Path
) -> dict[str, Any]:
    """How the masks of a slide differ; raises AssertionError if by more than a thousandth."""
    from thinsection.qc import run_qc

    one, other = (
        run_qc(slide, preset, device=d, cache_dir=folder) for d in ("cpu", device)
    )
    assert list(one.masks) == list(other.masks), (list(one.masks), list(other.masks))
    differ = {
        name: int((mask ^ other.masks[name]).sum()) for name, mask in one.masks.items()
    }
    union = int((one.mask_use | other.mask_use).sum())
    iou = int((one.mask_use & other.mask_use).sum()) / max(union, 1)
    assert iou >= 0.999 and sum(differ.values()) <= union / 1000, (iou, union, differ)
    return {"iou": iou, "pixels": union, "pixels that differ": sum(differ.values())}


STEPS = {
    "check queues": check_queues,
    "check encoders": check_encoders,
    "check attention": check_attention,
    "check second card": check_second_card,
    "check slide encoders": check_slide_encoders,
    "check neighbors and frames": check_geometry,
    "check qc": check_qc,
}
