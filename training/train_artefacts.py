"""Trains the artefact networks: `make train-artefacts`, or `python -m training.train_artefacts`.

On scenes of `training/scenes.py` at 8 µm/px, with real tissue of `training/real_tissue.py`. The
networks differ only in the random numbers of their start and of their crops: their mean errs less
than each of them on slides that no scene resembles. Seeds and the number of threads are stated, so
that the same machine and versions give the same file. The networks compute in bfloat16. Progress is
kept in a folder, and a new start goes on from there. The file of weights records the recipe, the
hashes of these scripts and of all data, and the report on held-out scenes.
Then raise `_VERSION` in qc/pipeline.
"""

import argparse
import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors.numpy import save_file
from scipy import ndimage
from torch import Tensor

from thinsection.arrays import get_namespace
from thinsection.qc.checks.artefact_network import (
    CLASSES,
    INKS,
    MODEL,
    density_tables,
    input_planes,
)
from thinsection.types import MaskArray, RgbArray
from training import real_tissue
from training.artefact_slide import ArtefactSlide
from training.lookalikes import LOOKALIKES
from training.network import ArtefactNetwork, layer_arrays
from training.real_tissue import Layout
from training.scenes import training_slide

# Scenes are drawn at 4 µm/px and looked at at 8.
MPP = 4.0
FACTOR = 2
# Of a bubble: its inside looks like what lies below and is filled by the check.
RIM_PX = 8
# The class of pixels that teach nothing: borders of artefacts, insides of bubbles.
UNSURE = -1
# Classes in the order in which they hide each other.
_DRAWN = (
    "fold",
    "bubble",
    "coverslip",
    *(f"pen_{ink}" for ink in INKS),
    "dust",
    "edge",
)

Labels = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, beside scripts and data."""

    num_steps: int = 45_000
    # last steps, in which the learning rate falls to 0
    decay_steps: int = 15_000
    warm_up_steps: int = 200
    # first seed of the scenes of the training, and of those that only report
    first_seed: int = 100_000
    first_report_seed: int = 900_000
    num_report_scenes: int = 30
    # of a scene, pixels of 4 µm: (width, height)
    scene_size: tuple[int, int] = (1000, 800)
    # scenes before the first step, steps until the next one, and the most at a time
    first_scenes: int = 60
    steps_per_scene: int = 20
    most_scenes: int = 600
    num_crops: int = 4
    crop_px: int = 192
    learning_rate: float = 3e-3
    weight_decay: float = 1e-3
    # share of crops around a class or a look-alike that is drawn evenly
    even_share: float = 0.6
    # of a class in the loss, where it is not 1.5
    first_weights: Mapping[str, float] = field(
        default_factory=lambda: {"glass": 0.7, "tissue": 1.0, "fold": 2.0}
    )
    # steps after which rare classes weigh more; where a class is not here, 3
    first_steps: int = 7_000
    class_weights: Mapping[str, float] = field(
        default_factory=lambda: {
            "glass": 0.7,
            "tissue": 1.0,
            "fold": 8.0,
            "bubble": 5.0,
            "coverslip": 6.0,
            "dust": 6.0,
        }
    )
    lookalike_weight: float = 2.5
    report_steps: int = 5000
    save_steps: int = 250
    # of the first network, the next one has the next
    torch_seed: int = 0
    num_networks: int = 3
    num_threads: int = 2
    # without it, tissue is generated alone
    real_tissue: bool = True

    def rate_share(self, step: int) -> float:
        """Learning rate of a step over the highest: it rises, stays, and falls at the end."""
        rising = (step + 1) / self.warm_up_steps
        falling = (self.num_steps - step) / self.decay_steps
        return max(0.0, min(1.0, rising, falling))

    def weights_at(self, step: int) -> npt.NDArray[np.float64]:
        """Weight in the loss of each of `CLASSES`."""
        if step < self.first_steps:
            return np.array([self.first_weights.get(name, 1.5) for name in CLASSES])
        return np.array([self.class_weights.get(name, 3.0) for name in CLASSES])


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A scene at 8 µm/px."""

    rgb: RgbArray
    # class of each pixel, or `UNSURE`
    classes: Labels
    # 1 + index in `LOOKALIKES`; 0 is none
    lookalikes: Labels


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains by the released recipe, or with fewer steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--cache", type=Path, required=True, help="folder of progress")
    parser.add_argument("--steps", type=int, default=Recipe().num_steps)
    values = parser.parse_args(arguments)
    train(replace(Recipe(), num_steps=values.steps), values.cache, values.out)


def train(recipe: Recipe, cache_dir: Path, out: Path) -> None:
    """Writes the file of weights; goes on from the progress of an earlier process.

    Memory: about 1 GB with the released recipe, 3 GB while layouts are drawn the first time.
    """
    torch.set_num_threads(recipe.num_threads)
    scenes = Scenes(recipe, cache_dir)
    networks = []
    arrays = {}
    for number in range(recipe.num_networks):
        one = replace(recipe, torch_seed=recipe.torch_seed + number)
        networks.append(_trained(one, scenes, cache_dir))
        for name, array in layer_arrays(networks[-1]).items():
            arrays[f"{number}.{name}"] = array
    report = report_on(networks, scenes.held_out())
    save_file(arrays, out, metadata=record_of(recipe, report))


def _trained(recipe: Recipe, scenes: "Scenes", cache_dir: Path) -> ArtefactNetwork:
    """One network.

    Progress is kept until the learning rate falls, so that a recipe with more steps can use it, and
    when the network is finished.
    """
    torch.manual_seed(recipe.torch_seed)
    network = ArtefactNetwork()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate_share)
    parts: dict[str, Any] = {
        "network": network,
        "optimizer": optimizer,
        "schedule": schedule,
    }
    key = progress_key(recipe)
    finished = cache_dir / f"{key}-{recipe.num_steps}.pt"
    kept = cache_dir / f"{key}.pt"
    first = 0
    for path in (finished, kept):
        if path.is_file():
            saved = torch.load(path, weights_only=True)
            first = saved.pop("step")
            for name, state in saved.items():
                parts[name].load_state_dict(state)
            break
    pool = Pool(scenes, recipe)
    losses: list[float] = []
    for step in range(first, recipe.num_steps):
        pool.move_to(step)
        losses.append(_train_step(network, optimizer, pool, recipe, step))
        schedule.step()
        done = step + 1
        if done % 50 == 0:
            sys.stderr.write(f"{done} {np.mean(losses[-50:]):.4f}\n")
        if done % recipe.report_steps == 0 and done < recipe.num_steps:
            report = report_on([network], scenes.held_out())
            sys.stderr.write(f"{done} {json.dumps(report)}\n")
        is_last = done == recipe.num_steps
        is_kept = done % recipe.save_steps == 0
        if is_last or (is_kept and done <= recipe.num_steps - recipe.decay_steps):
            path = finished if is_last else kept
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": done, **states}, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
    return network


def _train_step(
    network: ArtefactNetwork,
    optimizer: torch.optim.Optimizer,
    pool: "Pool",
    recipe: Recipe,
    step: int,
) -> float:
    rng = np.random.default_rng([recipe.torch_seed, step])
    class_weights = recipe.weights_at(step)
    crops = [
        crop(pool.choose(rng), rng, recipe, class_weights)
        for _ in range(recipe.num_crops)
    ]
    planes, truth, weights = (torch.stack(side) for side in zip(*crops, strict=True))
    network.train()
    planes = planes.contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(planes)
    each = torch.nn.functional.cross_entropy(
        logits.float(), truth, ignore_index=UNSURE, reduction="none"
    )
    loss = (each * weights).sum() / weights.sum()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(network.parameters(), 2.0)
    optimizer.step()
    return float(loss.detach())


class Scenes:
    """Examples by seed, each drawn once and kept in the folder of progress."""

    def __init__(self, recipe: Recipe, cache_dir: Path) -> None:
        self._recipe = recipe
        key = hashlib.sha256(
            json.dumps(
                [recipe.scene_size, recipe.real_tissue, script_hashes()]
            ).encode()
        )
        self._folder = cache_dir / f"scenes-{key.hexdigest()[:12]}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._layouts: list[Layout] = []
        self._pictures: tuple[RgbArray, ...] = ()
        if recipe.real_tissue:
            self._layouts = real_tissue.layouts(cache_dir)
            self._pictures = real_tissue.pictures()

    def example(self, seed: int) -> Example:
        """The scene of a seed."""
        path = self._folder / f"{seed}.npz"
        if not path.is_file():
            slide = training_slide(
                seed,
                size=self._recipe.scene_size,
                mpp=MPP,
                layouts=self._layouts,
                pictures=self._pictures,
            )
            drawn = example_of(slide)
            np.savez_compressed(path, **asdict(drawn))
        with np.load(path, allow_pickle=False) as arrays:
            return Example(**{name: arrays[name] for name in arrays.files})

    def held_out(self) -> Iterable[Example]:
        """The scenes that only report."""
        first = self._recipe.first_report_seed
        for seed in range(first, first + self._recipe.num_report_scenes):
            yield self.example(seed)


class Pool:
    """The scenes that crops are taken from: new ones come, the oldest go."""

    def __init__(self, scenes: Scenes, recipe: Recipe) -> None:
        self._scenes = scenes
        self._recipe = recipe
        self._examples: dict[int, Example] = {}
        self._having: list[list[int]] = [[] for _ in _kinds()]

    def move_to(self, step: int) -> None:
        """Makes it what it is at a step."""
        recipe = self._recipe
        last = recipe.first_scenes + step // recipe.steps_per_scene
        wanted = range(max(0, last - recipe.most_scenes), last)
        for number in [n for n in self._examples if n not in wanted]:
            del self._examples[number]
            for numbers in self._having:
                if number in numbers:
                    numbers.remove(number)
        for number in wanted:
            if number in self._examples:
                continue
            example = self._scenes.example(recipe.first_seed + number)
            self._examples[number] = example
            for kind, numbers in zip(_kinds(), self._having, strict=True):
                if kind.where(example).any():
                    numbers.append(number)

    def choose(self, rng: np.random.Generator) -> tuple[Example, MaskArray | None]:
        """An example, and where a crop of it should be; None: anywhere."""
        if rng.random() < self._recipe.even_share:
            kinds = _kinds()
            kind = int(rng.choice(len(kinds), p=[k.share for k in kinds]))
            if self._having[kind]:
                example = self._examples[int(rng.choice(self._having[kind]))]
                return example, kinds[kind].where(example)
        return self._examples[int(rng.choice(list(self._examples)))], None


@dataclass(frozen=True, slots=True)
class _Kind:
    """Pixels that crops are drawn around."""

    share: float
    # index in `CLASSES`, or -1 for any look-alike
    number: int

    def where(self, example: Example) -> MaskArray:
        if self.number < 0:
            return np.asarray(example.lookalikes > 0)
        return np.asarray(example.classes == self.number)


def _kinds() -> list[_Kind]:
    shares = {"fold": 0.32, "bubble": 0.13, "coverslip": 0.06, "dust": 0.06}
    shares |= {"edge": 0.03, **{f"pen_{ink}": 0.05 for ink in INKS}}
    kinds = [_Kind(share, CLASSES.index(name)) for name, share in shares.items()]
    return [*kinds, _Kind(1 - sum(shares.values()), -1)]


def example_of(slide: ArtefactSlide) -> Example:
    """A scene at 8 µm/px, with the class of each pixel; what is drawn later hides the rest."""
    rgb = np.asarray(Image.fromarray(slide.rgb).reduce(FACTOR))
    masks = {name: reduced(mask) for name, mask in slide.masks.items()}
    classes = masks["tissue"].astype(np.int8)
    if "unsure" in masks:
        classes[masks["unsure"]] = UNSURE
    for name in _DRAWN:
        if name not in masks:
            continue
        where = masks[name]
        around = ndimage.binary_dilation(where) & ~where & (classes <= 1)
        classes[around] = UNSURE
        classes[where] = CLASSES.index(name)
        if name == "bubble":
            bubble = np.pad(where, 1, "edge")
            inside = ndimage.distance_transform_edt(bubble)[1:-1, 1:-1] > RIM_PX
            classes[inside] = UNSURE
    lookalikes = np.zeros_like(classes)
    for number, name in enumerate(LOOKALIKES):
        if f"like_{name}" in masks:
            lookalikes[masks[f"like_{name}"] & (classes == 1)] = 1 + number
    return Example(rgb=rgb, classes=classes, lookalikes=lookalikes)


def reduced(mask: MaskArray) -> MaskArray:
    """A mask at 8 µm/px."""
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    return np.asarray(image.reduce(FACTOR)) > 127


def crop(
    chosen: tuple[Example, MaskArray | None],
    rng: np.random.Generator,
    recipe: Recipe,
    class_weights: npt.NDArray[np.float64],
) -> tuple[Tensor, Tensor, Tensor]:
    """Planes (4, px, px), classes and weights (px, px) of a part: turned, scaled, recoloured."""
    example, wanted = chosen
    px = recipe.crop_px
    zoom = 1.0
    if rng.random() < 0.3:
        zoom = float(np.exp(rng.uniform(np.log(0.6), np.log(1.35))))
    # pixels of the example that become the crop
    edge = min(round(px / zoom), *example.classes.shape)
    height, width = example.classes.shape
    top = int(rng.integers(height - edge + 1))
    left = int(rng.integers(width - edge + 1))
    if wanted is not None:
        places = np.flatnonzero(wanted)
        row, column = divmod(int(rng.choice(places)), width)
        top = int(np.clip(row - rng.integers(edge), 0, height - edge))
        left = int(np.clip(column - rng.integers(edge), 0, width - edge))
    part = (slice(top, top + edge), slice(left, left + edge))
    ns = get_namespace("cpu")
    tables = density_tables(ns, example.rgb)
    rgb = example.rgb[part]
    classes = example.classes[part]
    lookalikes = example.lookalikes[part]
    if edge != px:
        how = Image.Resampling.BOX if edge > px else Image.Resampling.BILINEAR
        rgb = np.asarray(Image.fromarray(rgb).resize((px, px), how))
        classes = _resized(classes, px)
        lookalikes = _resized(lookalikes, px)
    light = rgb.astype(np.float32)
    if rng.random() < 0.2:
        sigma = rng.uniform(0, 1.2)
        light = ndimage.gaussian_filter(light, (sigma, sigma, 0))
    if rng.random() < 0.35:
        light += rng.normal(0, rng.uniform(0, 6), light.shape)
    planes = input_planes(ns, light.clip(0, 255).astype(np.uint8), tables, 1)
    if rng.random() < 0.8:
        density = planes[..., :3] * np.exp(rng.normal(0, 0.15) + rng.normal(0, 0.05, 3))
        density += rng.normal(0, 0.012, 3)
        planes[..., :3] = density
        planes[..., 3] = np.log(density.mean(axis=2).clip(0, None) / 0.06 + 1)
    weights = np.where(classes < 0, 0, class_weights[classes.clip(0)])
    weights = weights * np.where(lookalikes > 0, recipe.lookalike_weight, 1)
    turns = int(rng.integers(4))
    flips = rng.random() < 0.5

    def turned(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        array = np.rot90(array, turns)
        return np.ascontiguousarray(array[:, ::-1] if flips else array)

    return (
        torch.from_numpy(turned(planes).astype(np.float32).transpose(2, 0, 1).copy()),
        torch.from_numpy(turned(classes).astype(np.int64)),
        torch.from_numpy(turned(weights).astype(np.float32)),
    )


def _resized(labels: Labels, px: int) -> Labels:
    image = Image.fromarray(labels.view(np.uint8))
    return np.asarray(image.resize((px, px), Image.Resampling.NEAREST)).view(np.int8)


def report_on(
    networks: Sequence[ArtefactNetwork], examples: Iterable[Example]
) -> dict[str, float]:
    """Recall and precision of each class where the mean P > 1/2, and tissue lost by look-alike."""
    for network in networks:
        network.eval()
    ns = get_namespace("cpu")
    hits = np.zeros(len(CLASSES))
    true = np.zeros(len(CLASSES))
    found = np.zeros(len(CLASSES))
    lost = np.zeros(1 + len(LOOKALIKES))
    seen = np.zeros(1 + len(LOOKALIKES))
    unsure: list[float] = []
    for example in examples:
        height, width = example.classes.shape
        tables = density_tables(ns, example.rgb)
        planes = input_planes(ns, example.rgb, tables, 1).transpose(2, 0, 1)
        inputs = torch.from_numpy(planes[None].copy())
        with torch.inference_mode():
            each = [torch.softmax(network(inputs), 1) for network in networks]
        p = np.asarray(torch.stack(each).mean(0)[0, :, :height, :width])
        judged = example.classes >= 0
        sure = p > 0.5
        unsure.append(1 - float(sure.max(axis=0)[judged].mean()))
        for number in range(len(CLASSES)):
            truth = example.classes == number
            hits[number] += np.count_nonzero(sure[number] & truth)
            true[number] += np.count_nonzero(truth)
            found[number] += np.count_nonzero(sure[number] & judged)
        # P of any artefact together
        artefact = p[2:].sum(axis=0) > 0.5
        tissue = example.classes == 1
        lost += np.bincount(
            example.lookalikes[tissue & artefact], minlength=1 + len(LOOKALIKES)
        )
        seen += np.bincount(example.lookalikes[tissue], minlength=1 + len(LOOKALIKES))
    report = {"unsure": round(float(np.mean(unsure)), 4)}
    for number, name in enumerate(CLASSES):
        report[f"{name} recall"] = round(hits[number] / max(1, true[number]), 3)
        report[f"{name} precision"] = round(hits[number] / max(1, found[number]), 3)
    for number, name in enumerate(("other tissue", *LOOKALIKES)):
        report[f"{name} lost"] = round(lost[number] / max(1, seen[number]), 4)
    return report


def record_of(recipe: Recipe, report: Mapping[str, float]) -> dict[str, str]:
    """What the file of weights says about its origin: one text, so that its bytes are the same."""
    data = {}
    if recipe.real_tissue:
        data = {path.name: real_tissue.sha256(path) for path in real_tissue.files()}
    record = {
        "classes": CLASSES,
        "recipe": asdict(recipe),
        "scripts": script_hashes(),
        "data": data,
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "report": report,
    }
    return {"record": json.dumps(record)}


def script_hashes() -> dict[str, str]:
    """Hash of the code of each script in this folder, without its comments and docstrings."""
    hashes = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and _is_text(body[0]):
                del body[0]
        hashes[path.name] = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
    return hashes


def _is_text(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def progress_key(recipe: Recipe) -> str:
    """Name of the progress of a recipe before its learning rate falls.

    Recipes that differ only in their number of steps share it: a longer one goes on from there.
    """
    common = replace(recipe, num_steps=0, num_networks=0)
    content = json.dumps([asdict(common), script_hashes()])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


if __name__ == "__main__":
    main()
