"""Trains the convolutional net of `auto`: `python -m tests.support.convnet_training`.

On slides of generator A (docs/validation/qc.md says which seeds), and on real tissue with A's
artefacts drawn onto it: the slides of THINSECTION_TEST_SLIDES and scikit-image's picture of IHC,
restained. Then raise `_VERSION` in qc/pipeline. One thread, seeded: some 50 minutes of one core.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from scipy import ndimage
from tests.support.artefact_slide import ArtefactSlide
from tests.support.artefact_training import (
    COARSE_SIZE,
    MPP,
    REAL,
    REAL_FACTOR,
    SIZE,
    WORK_MPP,
    Labels,
    reduced,
)
from tests.support.tuning_slide import tuning_slide
from torch import Tensor, nn

from thinsection.qc.checks import convnet
from thinsection.qc.checks.artefact_maps import CLASSES
from thinsection.slide import open_slide
from thinsection.types import RgbArray

SEEDS, COARSE_SEEDS, REAL_SEEDS = range(150), range(1000, 1400), range(5000, 5090)
SHA256 = (
    "2fbca6812471f38903d66965af93a83d5c8465839d315d4e26ef6b10ccbfa7c0"  # of what ships
)
NUM_CROPS, CROP_PX = 4, 224
# steps, their highest rate, how often a crop is chosen for a class (that rare ones are seen), and
# how many times real tissue is in the pool
PHASES = (
    (3000, 4e-3, 0.0, 1),
    (6000, 2e-3, 1.0, 1),
    (8000, 2e-3, 0.5, 1),
    (8000, 2e-3, 0.5, 7),
)
RIM_PX = 8  # of a bubble, whose inside looks like what is below it: filled, not told by the net
# weight of a px of a class in the loss (2 where none is said): first, and where rare classes are
# shown as often as others, and how often they are then
WEIGHTS = (
    {"glass": 0.5, "tissue": 1.0},
    {"glass": 0.7, "tissue": 1.0, "fold": 4.0, "bubble": 1.5},
)
EVEN_SHARES = (0.0, 0.15, 0.35, 0.13, 0.06, 0.03, 0.03, 0.05, 0.05, 0.05, 0.05, 0.05)

CHANNELS, LAST = (
    (16, 32, 48, 64, 64),
    24,
)  # of the grids, and of what the classes are made of
Example = tuple[
    RgbArray, Labels, npt.NDArray[np.float32]
]  # at 8 µm/px, and light of the glass


def main() -> None:
    """Writes the model into the package, or to the path that is given."""
    own = Path(convnet.__file__).parent / "models" / "convnet.npz"
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else own
    torch.set_num_threads(1)
    examples = [example(slide) for slide in slides()]
    torch.manual_seed(0)
    net = Net()
    for phase in range(
        len(PHASES)
    ):  # the first has batch normalisation, then part of the weights
        net = folded(fitted(net, examples, phase))
    np.savez(target, **arrays(net))  # type: ignore[arg-type]


def slides() -> Iterator[ArtefactSlide]:
    """Generated slides, then real tissue with artefacts."""
    for seed in SEEDS:
        yield tuning_slide(seed, size=SIZE, mpp=MPP)
    for seed in COARSE_SEEDS:
        yield tuning_slide(seed, size=COARSE_SIZE, mpp=WORK_MPP)
    bases = real_tissue()
    for seed in REAL_SEEDS:
        rng = np.random.default_rng([seed, 3])
        base = restained(bases[seed % len(bases)], rng)
        yield tuning_slide(seed, size=SIZE, mpp=MPP, base=cut_out(base, rng))


def real_tissue() -> list[RgbArray]:
    """Light of real tissue at about 4 µm/px, uint8."""
    from skimage import data

    bases = []
    for name in REAL:
        with open_slide(Path(os.environ["THINSECTION_TEST_SLIDES"]) / name) as slide:
            px = slide.read_region((0, 0), 0, slide.size)
        bases.append(np.asarray(Image.fromarray(px).reduce(REAL_FACTOR)))
    return [*bases, np.asarray(Image.fromarray(data.immunohistochemistry()).reduce(2))]


def restained(rgb: RgbArray, rng: np.random.Generator) -> RgbArray:
    """The tissue as it is, or gray, or pale or dense, or with the channels' densities mixed."""
    density = -np.log(np.maximum(rgb, 2) / np.percentile(rgb, 99, axis=(0, 1)))
    match rng.integers(5):
        case 0:
            density[:] = density.mean(axis=2, keepdims=True)
        case 1:  # brown and blue change places
            density = density[..., ::-1]
        case 2:
            density = density @ (np.eye(3) + rng.uniform(0, 0.4, (3, 3)))
    density *= np.exp(rng.uniform(np.log(0.3), np.log(2.2)))
    return np.asarray(255 * np.exp(-density.clip(0, 4)), np.uint8)


def cut_out(rgb: RgbArray, rng: np.random.Generator) -> RgbArray:
    """Mirrored tissue on glass of the size of a slide, in pieces with borders of their own."""
    height, width = SIZE[::-1]
    more = [(0, max(0, height - len(rgb))), (0, max(0, width - rgb.shape[1])), (0, 0)]
    whole = np.pad(rgb, more, "symmetric")[:height, :width]  # type: ignore[arg-type]
    field = ndimage.gaussian_filter(
        rng.standard_normal((height // 8 + 1, width // 8 + 1)), 12
    )
    field += (
        0.2
        * ndimage.gaussian_filter(rng.standard_normal(field.shape), 2)
        * field.std()
        * 7
    )
    outline = field.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]
    tissue = outline > np.quantile(outline, rng.uniform(0.02, 0.6))
    soft = ndimage.gaussian_filter(tissue.astype(np.float32), 2)[..., None]
    return np.asarray(whole * soft + 250 * (1 - soft), np.uint8)


def example(slide: ArtefactSlide) -> Example:
    """A slide at 8 µm/px and the class of each px."""
    factor = round(WORK_MPP / slide.mpp)
    classes = labels(
        {name: reduced(mask, factor) for name, mask in slide.masks.items()}
    )
    rgb = np.asarray(Image.fromarray(slide.rgb).reduce(factor))
    return rgb, classes, glass_of(rgb)


def labels(masks: Mapping[str, npt.NDArray[np.bool_]]) -> Labels:
    """The class of each px; what is drawn later hides what was there."""
    classes = masks["tissue"].astype(np.int8)
    none = np.zeros_like(masks["tissue"])
    for name in ("fold", "bubble", "coverslip", *CLASSES[7:], "dust", "edge"):
        classes[masks.get(name, none)] = CLASSES.index(name)
    return rims(classes)


def rims(classes: Labels) -> Labels:
    """The inside of bubbles is no class, -1."""
    bubble = np.pad(classes == CLASSES.index("bubble"), 1, "edge")
    inside = ndimage.distance_transform_edt(bubble)[1:-1, 1:-1] > RIM_PX
    classes[inside] = -1
    return classes


def glass_of(rgb: RgbArray) -> npt.NDArray[np.float32]:
    """Light of the glass in red, green and blue, as `density_features` takes it."""
    light = [np.percentile(rgb[::4, ::4, c], 97) for c in range(3)]
    return np.maximum(light, 60).astype(np.float32)


def crop(
    examples: list[Example], rng: np.random.Generator, having: list[list[int]] | None
) -> tuple[Tensor, Tensor]:
    """Densities (3, px, px) and classes (px, px) of a part of a slide, turned, scaled, recoloured.

    having: of each class the examples that have it: rare ones are then shown as often as others.
    """
    wanted = -1
    if having is None:
        rgb, classes, glass = examples[rng.integers(len(examples))]
    else:
        wanted = int(rng.choice(len(CLASSES), p=EVEN_SHARES))
        rgb, classes, glass = examples[rng.choice(having[wanted])]
    scaled = rng.random() < (0.5 if having is None else 0.3)
    zoom = float(np.exp(rng.uniform(np.log(0.45), np.log(1.3)))) if scaled else 1.0
    if zoom != 1:
        size = (round(rgb.shape[1] * zoom), round(rgb.shape[0] * zoom))
        how = Image.Resampling.BOX if zoom < 1 else Image.Resampling.BILINEAR
        rgb = np.asarray(Image.fromarray(rgb).resize(size, how))
        classes = np.asarray(
            Image.fromarray(classes.view(np.uint8)).resize(size, 0)
        ).view(np.int8)
    more = [(0, max(0, CROP_PX - edge)) for edge in classes.shape]
    if any(high for _, high in more):
        rgb = np.pad(rgb, [*more, (0, 0)], "symmetric")
        classes = np.pad(classes, more, "symmetric")
    top, left = (rng.integers(edge - CROP_PX + 1) for edge in classes.shape)
    at_artefact = classes > 1 if having is None else classes == wanted
    if (
        rng.random() < (0.5 if having is None else 0.9)
        and (places := np.flatnonzero(at_artefact)).size
    ):
        y, x = divmod(int(rng.choice(places)), classes.shape[1])
        top, left = (
            int(np.clip(at - rng.integers(CROP_PX), 0, edge - CROP_PX))
            for at, edge in zip((y, x), classes.shape, strict=True)
        )
    part = (slice(top, top + CROP_PX), slice(left, left + CROP_PX))
    light, y = rgb[part].astype(np.float32), classes[part].astype(np.int64)
    if rng.random() < 0.2:
        light = ndimage.gaussian_filter(light, (*rng.uniform(0, 1.2, 1).repeat(2), 0))
    if rng.random() < 0.4:
        light += rng.normal(0, rng.uniform(0, 7), light.shape)
    density = -np.log(np.maximum(light, 4) / glass)
    if rng.random() < 0.8:
        density = density * np.exp(rng.normal(0, 0.15) + rng.normal(0, 0.05, 3))
        density = density + rng.normal(0, 0.012, 3)
    turns = int(rng.integers(4))
    x, y = np.rot90(density, turns), np.rot90(y, turns)
    if rng.random() < 0.5:
        x, y = x[:, ::-1], y[:, ::-1]
    x = np.ascontiguousarray(x.clip(-0.1, 4).transpose(2, 0, 1), np.float32)
    return torch.from_numpy(x), torch.from_numpy(np.ascontiguousarray(y))


class Net(nn.Module):
    """The twin in PyTorch of `convnet_maps`.

    From densities (N, 3, px, px) to logits (N, classes, 4, px / 2, px / 2) of squares of 2 x 2 px,
    and which squares are asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        channels = CHANNELS
        ins = (12, *channels[:-1])
        self.down = nn.ModuleList(
            nn.ModuleList([block(low, high), block(high, high)])
            for low, high in zip(ins, channels, strict=True)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(high, 4 * low, 1) for low, high in pairwise(channels)
        )
        outs = (LAST, *channels[1:-1])
        self.join = nn.ModuleList(
            block(low, out) for low, out in zip(channels, outs, strict=False)
        )
        self.out = nn.Conv2d(LAST, 4 * len(CLASSES), 1)

    def forward(self, density: Tensor) -> tuple[Tensor, Tensor]:
        x = nn.functional.pixel_unshuffle(density, 2)
        near = nn.functional.avg_pool2d(
            x.mean(1, keepdim=True), 3, 1, 1, count_include_pad=False
        )
        asked = [(near > convnet.GLASS_DENSITY).float()]
        kept: list[Tensor] = []
        for n, (first, second) in enumerate(self.down):  # type: ignore[misc]
            if n:
                x = nn.functional.max_pool2d(x, 2, ceil_mode=True)
                asked.append(nn.functional.max_pool2d(asked[-1], 2, ceil_mode=True))
            x = second(first(x) * asked[n]) * asked[n]
            kept.append(x)
        for n in reversed(range(len(self.up))):
            wide = nn.functional.pixel_shuffle(self.up[n](x), 2)
            wide = wide[..., : kept[n].shape[2], : kept[n].shape[3]]
            wide = wide.contiguous(memory_format=torch.channels_last)
            x = self.join[n](kept[n] + wide * asked[n]) * asked[n]
        return self.out(x).unflatten(1, (len(CLASSES), 4)), asked[0] > 0


def block(low: int, high: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(low, high, 3, padding=1, bias=False),
        nn.BatchNorm2d(high),
        nn.ReLU(inplace=True),
    )


def folded(net: Net) -> Net:
    """The same net with its normalisation in the weights, which are rounded to float16."""
    for part in net.modules():
        if isinstance(part, nn.Sequential) and isinstance(
            norm := part[1], nn.BatchNorm2d
        ):
            conv: Any = part[0]
            gain = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)  # type: ignore[operator]
            conv.weight.data = conv.weight.detach().double() * gain[:, None, None, None]
            conv.bias = nn.Parameter(norm.bias.detach() - norm.running_mean * gain)
            part[1] = nn.Identity()
    for value in net.parameters():
        value.data = value.data.half().float()
    return net


def fitted(net: Net, examples: list[Example], phase: int) -> Net:
    """The net after the steps of a phase, of `NUM_CROPS` crops each."""
    (num_steps, rate, even, times), rng = PHASES[phase], np.random.default_rng(phase)
    examples = examples + examples[-len(REAL_SEEDS) :] * (times - 1)
    net = net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=num_steps, pct_start=0.15
    )
    weights = torch.tensor([WEIGHTS[even > 0].get(name, 2.0) for name in CLASSES])
    having = [
        [n for n, (_, y, _) in enumerate(examples) if (y == c).any()] for c in range(12)
    ]
    running: Any = 0.0
    for step in range(num_steps):
        chosen = (
            even == 1 or (even > 0 and rng.random() < even) for _ in range(NUM_CROPS)
        )
        pairs = [crop(examples, rng, having if choose else None) for choose in chosen]
        x, y = (torch.stack(side) for side in zip(*pairs, strict=True))
        with torch.autocast("cpu", torch.bfloat16):
            logits, asked = net(x.contiguous(memory_format=torch.channels_last))
        truth = torch.where(asked, nn.functional.pixel_unshuffle(y[:, None], 2), -1)
        loss = nn.functional.cross_entropy(
            logits.float(), truth, weights, ignore_index=-1
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        optimizer.step()
        schedule.step()
        running += float(loss.detach())
        if step % 50 == 49:
            sys.stderr.write(f"{step + 1} {running / 50:.4f}\n")
            running = 0.0
    return net


def arrays(net: Net) -> dict[str, npt.NDArray[np.float16]]:
    """Weights (9 * in, out) and biases of the layers by name."""
    layers: dict[str, Any] = {"out": net.out}
    for n, (first, second) in enumerate(net.down):  # type: ignore[misc]
        layers |= {f"down{n}a": first[0], f"down{n}b": second[0]}
    for n, (up, join) in enumerate(zip(net.up, net.join, strict=True)):
        layers |= {f"up{n}": up, f"join{n}": join[0]}  # type: ignore[index]
    values = {}
    for name, conv in layers.items():
        weight = conv.weight.detach().permute(2, 3, 1, 0)
        values[f"{name}_w"] = (
            weight.reshape(-1, weight.shape[3]).numpy().astype(np.float16)
        )
        values[f"{name}_b"] = conv.bias.detach().numpy().astype(np.float16)
    return values


if __name__ == "__main__":
    main()
