"""Trains the ink network: `make train-ink`, or `python -m training.ink.train`.

Strokes are planted anew at each step on backgrounds of `training.ink.backgrounds`. The seed and the
number of threads are stated, so that the same machine and versions give the same file. Progress is
kept in a folder, and a new start goes on from there. The file of weights records the recipe, the
hashes of these scripts, and the report on backgrounds that were held out. Then raise `_VERSION` in
qc/pipeline.
"""

import argparse
import ast
import hashlib
import json
import sys
import time
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors.numpy import save_file
from scipy import ndimage
from torch import Tensor, nn

from thinsection.arrays import get_namespace
from thinsection.qc.checks.artefact_network import density_tables
from thinsection.qc.checks.ink_network import (
    MODEL,
    NUM_PLANES,
    ink_planes,
    usual_stain,
)
from training.ink.backgrounds import Background, backgrounds
from training.ink.biology import plant_biology
from training.ink.strokes import Field, plant_strokes
from training.network import ArtefactNetwork, _block, layer_arrays
from training.real_tissue import files, sha256

# Channels on grids of 32, 64, 128, 256 and 512 µm, and of what the classes are made of.
CHANNELS = (24, 32, 48, 64, 64)
LAST = 16
# Densities of haematoxylin and eosin, whose amounts are stained in other colours.
_STAINS = np.array([(0.65, 0.70, 0.29), (0.10, 0.98, 0.20)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What decides the weights, beside the scripts."""

    seed: int = 52
    first_background: int = 300_000
    num_backgrounds: int = 200
    held_out: int = 20
    # the learning rate rises for a tenth of a cycle and falls over the rest; from a step before its
    # end on, it falls to 0 until the last step
    cycle_steps: int = 17_000
    fall_step: int = 11_000
    num_steps: int = 13_500
    # share of the former weights in the mean over steps, which is what is kept
    mean_share: float = 0.998
    batch_size: int = 8
    crop_px: int = 128
    learning_rate: float = 3e-3
    without_ink: float = 0.3
    # share of examples with planted biology, which grows from 0 between these steps
    with_biology: float = 0.4
    biology_steps: tuple[int, int] = (1_500, 6_000)
    lookalike_weight: float = 1.5


class InkNetwork(ArtefactNetwork):
    """Planes (B, 7, H, W) to logits of two classes, (B, 2, H, W)."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        ins = (4 * NUM_PLANES, *CHANNELS[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(*_block(low, high), *_block(high, high))
            for low, high in zip(ins, CHANNELS, strict=True)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(high, low, 1) for low, high in pairwise(CHANNELS)
        )
        outs = (LAST, *CHANNELS[1:-1])
        self.join = nn.ModuleList(
            nn.Sequential(*_block(low, out))
            for low, out in zip(CHANNELS, outs, strict=False)
        )
        self.out = nn.Conv2d(LAST, 4 * 2, 1)


def example(
    background: Background,
    rng: np.random.Generator,
    recipe: Recipe,
    *,
    with_biology: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Planes (7, px, px), classes and weights (px, px) of a part with strokes of its own."""
    rgb, like, grey = background
    px = recipe.crop_px
    zoom = (
        float(np.exp(rng.uniform(np.log(0.6), np.log(1.8))))
        if rng.random() < 0.5
        else 1.0
    )
    edge = min(round(px / zoom), *rgb.shape[:2])
    top = int(rng.integers(rgb.shape[0] - edge + 1))
    left = int(rng.integers(rgb.shape[1] - edge + 1))
    part = (slice(top, top + edge), slice(left, left + edge))
    crop = rgb[part]
    lookalike = like[part]
    if edge != px:
        how = Image.Resampling.BOX if edge > px else Image.Resampling.BICUBIC
        crop = np.asarray(Image.fromarray(crop).resize((px, px), how))
        shown = Image.fromarray(lookalike.astype(np.uint8) * 255).resize((px, px))
        lookalike = np.asarray(shown) > 127
    white = np.maximum(np.percentile(rgb[::4, ::4], 97, axis=(0, 1)), 60)
    light = np.asarray((crop / white).clip(0.004, 1.05), np.float32)
    if not grey and rng.random() < 0.6:
        light = _restained(light, rng)
    if rng.random() < with_biology:
        light, planted = plant_biology(light, rng, grey=grey)
        lookalike = lookalike | planted
    classes = np.zeros((px, px), np.int64)
    unsure = np.zeros((px, px), bool)
    if rng.random() > recipe.without_ink:
        inked = plant_strokes(light, rng, grey=grey)
        light = inked.light
        classes[inked.ink] = 1
        unsure = inked.unsure
    if rng.random() < 0.3:
        sigma = rng.uniform(0, 0.9)
        light = ndimage.gaussian_filter(light, (sigma, sigma, 0))
    lamp = 255 * rng.uniform(0.8, 1.0) * rng.uniform(0.95, 1, 3)
    noise = rng.normal(0, rng.uniform(0, 3), light.shape)
    pixels = (light * lamp + noise).clip(0, 255).astype(np.uint8)
    ns = get_namespace("cpu")
    tables = density_tables(ns, pixels)
    planes = ink_planes(ns, pixels, tables, usual_stain(ns, pixels, tables))
    weights = np.where(
        unsure, 0, np.where(lookalike & (classes == 0), recipe.lookalike_weight, 1)
    )
    turns = int(rng.integers(4))
    flips = rng.random() < 0.5

    def turned(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        array = np.rot90(array, turns)
        return np.ascontiguousarray(array[:, ::-1] if flips else array)

    return (
        torch.from_numpy(turned(planes).transpose(2, 0, 1).copy()),
        torch.from_numpy(turned(classes)),
        torch.from_numpy(turned(weights.astype(np.float32))),
    )


def _restained(light: Field, rng: np.random.Generator) -> Field:
    """The same tissue in two other stains, or in other amounts of its own."""
    density = -np.log(light.clip(0.004, 1))
    if rng.random() < 0.4:
        gains = np.exp(rng.normal(0, 0.25) + rng.normal(0, 0.12, 3))
        return np.asarray(np.exp(-density * gains), np.float32)
    third = np.cross(*_STAINS)
    basis = np.vstack([_STAINS, third])
    amounts = density @ np.linalg.inv(basis)
    stains = rng.uniform(0.05, 1.0, (2, 3)) ** 1.3
    stains /= np.linalg.norm(stains, axis=1, keepdims=True)
    # often a counterstain of haematoxylin
    if rng.random() < 0.5:
        stains[0] = _STAINS[0]
    stains *= np.exp(rng.normal(0, 0.35, (2, 1)))
    other = amounts[..., :2].clip(0, None) @ stains + amounts[..., 2:] * third * 0.5
    return np.asarray(np.exp(-other.clip(0, 5)), np.float32)


def train(recipe: Recipe, cache_dir: Path, seconds: float) -> InkNetwork | None:
    """The trained network; None if the time was up before, and the progress is kept."""
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(1)
    network: InkNetwork = InkNetwork()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = deepcopy(network)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=recipe.learning_rate, weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.cycle_steps, pct_start=0.1
    )
    path = cache_dir / f"{progress_key(recipe)}.pt"
    first = 0
    if path.is_file():
        state = torch.load(path, weights_only=True)
        network.load_state_dict(state["network"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["step"]
    bank = backgrounds(recipe.first_background, recipe.num_backgrounds, cache_dir)
    started = time.monotonic()
    losses: list[float] = []
    network.train()
    for step in range(first, recipe.num_steps):
        rng = np.random.default_rng([recipe.seed, step])
        share = _biology_share(recipe, step)
        examples = [
            example(bank[int(rng.integers(len(bank)))], rng, recipe, with_biology=share)
            for _ in range(recipe.batch_size)
        ]
        planes, classes, weights = (torch.stack(each) for each in zip(*examples))
        with torch.autocast("cpu", torch.bfloat16):
            logits = network(planes.contiguous(memory_format=torch.channels_last))
        loss = nn.functional.cross_entropy(logits.float(), classes, reduction="none")
        loss = (loss * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        for group in optimizer.param_groups:
            group["lr"] *= _fall(recipe, step)
        # at the beginning, the mean follows closely
        _average_in(average, network, min(recipe.mean_share, (step + 1) / (step + 10)))
        losses.append(float(loss.detach()))
        is_late = time.monotonic() - started > seconds
        if step % 100 == 99:
            spent = time.process_time()
            sys.stderr.write(
                f"step {step + 1}, loss {np.mean(losses[-100:]):.4f}, CPU {spent:.0f} s\n"
            )
        if is_late or step % 500 == 499 or step == recipe.num_steps - 1:
            state = {
                "network": network.state_dict(),
                "average": average.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "step": step + 1,
            }
            torch.save(state, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
        if is_late and step < recipe.num_steps - 1:
            return None
    return average


def _fall(recipe: Recipe, step: int) -> float:
    """Factor of the learning rate of the cycle after a step."""
    length = recipe.num_steps - recipe.fall_step
    return min(1.0, (recipe.num_steps - 1 - step) / length)


def _biology_share(recipe: Recipe, step: int) -> float:
    first, last = recipe.biology_steps
    return recipe.with_biology * min(1.0, max(0.0, (step - first) / (last - first)))


@torch.no_grad()
def _average_in(average: InkNetwork, network: InkNetwork, share: float) -> None:
    """Moves the mean over steps towards the network's present weights."""
    states = zip(average.state_dict().values(), network.state_dict().values())
    for mean, value in states:
        if mean.is_floating_point():
            mean.lerp_(value, 1 - share)


def report_on(network: InkNetwork, recipe: Recipe, cache_dir: Path) -> dict[str, float]:
    """Recall and precision where P > 1/2, and the look-alikes taken for ink, on held-out seeds."""
    network.eval()
    first = recipe.first_background + 90_000
    bank = backgrounds(first, recipe.held_out, cache_dir)
    counts = np.zeros(5)
    for number, background in enumerate(bank):
        rng = np.random.default_rng([recipe.seed + 1, number])
        planes, classes, weights = example(
            background, rng, recipe, with_biology=recipe.with_biology
        )
        with torch.inference_mode():
            found = network(planes[None])[0].argmax(dim=0) == 1
        judged = weights > 0
        truth = (classes == 1) & judged
        like = (weights > 1) & (classes == 0)
        counts += [
            int((found & truth).sum()),
            int(truth.sum()),
            int((found & judged).sum()),
            int((found & like).sum()),
            int(like.sum()),
        ]
    return {
        "recall": round(counts[0] / max(1, counts[1]), 3),
        "precision": round(counts[0] / max(1, counts[2]), 3),
        "look-alikes taken": round(counts[3] / max(1, counts[4]), 4),
    }


def script_hashes() -> dict[str, str]:
    """Hash of the code of each script in this folder."""
    hashes = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hashes[path.name] = hashlib.sha256(
            ast.dump(ast.parse(path.read_text())).encode()
        ).hexdigest()
    return hashes


def progress_key(recipe: Recipe) -> str:
    content = json.dumps([asdict(recipe), script_hashes()])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("build/training"))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--model", type=Path, default=MODEL)
    args = parser.parse_args()
    recipe = Recipe()
    network = train(recipe, args.cache, args.seconds)
    if network is None:
        return
    record = {
        "recipe": asdict(recipe),
        "scripts": script_hashes(),
        "data": {path.name: sha256(path) for path in files()},
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "report": report_on(network, recipe, args.cache),
    }
    save_file(layer_arrays(network), args.model, {"record": json.dumps(record)})


if __name__ == "__main__":
    main()
