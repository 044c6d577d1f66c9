"""What `bench_job` asks of every way, ours and the peers', of whatever Python: without our package.

Pixels are normalised by ImageNet's mean and std; the network is a mean over pixels, ResNet-18 or
ViT-S under the same random weights. Every way is measured here, in a process of its own.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet: torchvision's
TILE_PX, CPU = 256, torch.device("cpu")
# way -> its reader: the fastest that works of those that it offers for JPEG in a TIFF. TRIDENT
# takes OpenSlide unless it is asked; slide2vec and Mussel take cuCIM where it is installed.
# LazySlide's cuCIM fails: wsidata 0.12.0 gets µm/px as text from it
READERS = {
    "openslide_pillow": "openslide",
    "trident": "cucim",
    "slide2vec": "cucim",
    "lazyslide": "openslide",
    "mussel": "cucim",
    "atlaspatch": "openslide",
    "tiatoolbox": "openslide",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked of every way."""

    path: str  # of the slide
    coords: str  # .npy: int64 (N, 2), top-left corners, level-0 px
    rows: str  # .npy to write: one row a tile, in the order of the coordinates
    mpp: float  # of level 0
    tile_mpp: float
    size_l0: int  # edge of a tile, level-0 px
    level: int  # that our plan reads
    size_lv: int  # edge of a tile, px of that level
    network: str  # 'mean', or a folder with ResNet-18 or ViT-S
    batch_size: int = 32
    limit: int | None = None  # so many of the coordinates
    every: int = 1  # and each n-th of those
    passes: int = 1  # so often in one process

    def coords_l0(self) -> np.ndarray:
        """The coordinates."""
        return np.load(self.coords)[: self.limit : self.every]

    @property
    def sample(self) -> "Job":
        """The job on some 16 tiles from all over: whose pixels are compared."""
        return replace(self, every=max(1, len(self.coords_l0()) // 16))

    @property
    def pixels(self) -> Path:
        """Of a .npy: grey levels of the sample, flat."""
        return Path(self.rows).with_suffix(".pixels.npy")


class Mean(nn.Module):
    """The least that an encoder can do."""

    def forward(self, tiles: Tensor) -> Tensor:
        return tiles.mean((2, 3))


def exact_means(tiles_u8: np.ndarray) -> np.ndarray:
    """Means of normalised tiles, uint8 (b, H, W, 3): sums are integers, divided once in float64."""
    # a column of 256 pixels sums to 65,280 at most
    columns = [tile.reshape(TILE_PX, -1).sum(0, dtype=np.uint16) for tile in tiles_u8]
    sums = np.reshape(columns, (-1, TILE_PX, 3)).sum(1, dtype=np.int64)
    return ((sums / (TILE_PX**2 * 255) - MEAN) / STD).astype(np.float32)


class Pixels(nn.Module):
    """The grey levels that were normalised: what the check of the pixels compares."""

    def forward(self, tiles: Tensor) -> Tensor:
        mean, std = torch.tensor([MEAN, STD]).view(2, 1, 3, 1, 1)
        return ((tiles * std + mean) * 255).round().permute(0, 2, 3, 1).flatten(1)


class Block(nn.Module):
    """Two 3 x 3 convolutions beside what passes them by."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        shortcut = (
            nn.Conv2d(before, channels, 1, stride, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.downsample = nn.Sequential(*(shortcut if stride > 1 else ()))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn1(self.conv1(x)).relu_()
        return self.bn2(self.conv2(inner)).add_(self.downsample(x)).relu_()


class ResNet18(nn.Module):
    """As in timm, by the same names; timm itself wants a torchvision that fits torch's build."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        widths = ((64, 64), (64, 128), (128, 256), (256, 512))
        for number, (before, channels) in enumerate(widths, start=1):
            first = Block(before, channels, 1 if number == 1 else 2)
            self.add_module(
                f"layer{number}", nn.Sequential(first, Block(channels, channels, 1))
            )

    def forward(self, tiles: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.bn1(self.conv1(tiles)).relu_(), 3, 2, 1)
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        return x.mean((2, 3))


class Attention(nn.Module):
    """Attention of all tokens to all, in PyTorch's fused form."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(b, n, width))


class Layer(nn.Module):
    """A layer of a vision transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(width, 4 * width),
                act=nn.GELU(),
                fc2=nn.Linear(4 * width, width),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VitS(nn.Module):
    """ViT-S/16 on tiles of TILE_PX, the class token of the last layer; by timm's names."""

    def __init__(self, width: int = 384, heads: int = 6, layers: int = 12) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        num_tokens = (TILE_PX // 16) ** 2 + 1
        self.pos_embed = nn.Parameter(torch.zeros(1, num_tokens, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, 16, 16)})
        self.blocks = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, tiles: Tensor) -> Tensor:
        x = self.patch_embed["proj"](tiles).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        return self.norm(self.blocks(x + self.pos_embed))[:, 0]


NETWORKS: dict[str, Callable[[], nn.Module]] = {"resnet18": ResNet18, "vit_s": VitS}


def network(name: str) -> nn.Module:
    """The job's network: 'mean', or that of a folder with the name of one of NETWORKS."""
    if name == "mean":
        return Mean()
    model = NETWORKS[Path(name).name]().eval()
    model.load_state_dict(load_file(Path(name) / "model.safetensors"), strict=True)
    return model


@torch.inference_mode()
def through(batches: Iterable[Tensor], model: nn.Module) -> np.ndarray:
    """Rows of all batches."""
    return np.concatenate([model(batch).numpy() for batch in batches])


def status_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    found = Path("/proc/self/status").read_text().partition(f"{name}:")[2]
    return int(found.split()[0]) * 1024


def measure(job: Job, run: Callable[[], np.ndarray]) -> None:
    """Runs all passes of a warm process, writes the rows, and prints one line of JSON.

    Memory is the peak of the first pass: the others find the heap as it left it.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = status_bytes("VmRSS")
    peak = 0
    seconds = []
    cpu_seconds = []
    for number in range(job.passes):
        cpu, start = time.process_time(), time.perf_counter()
        rows = run()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
        if number == 0:
            peak = status_bytes("VmHWM")
    np.save(job.rows, rows)
    found = {
        "tiles": len(rows),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "baseline_bytes": before,
        "peak_bytes": peak,
    }
    print("\n@measured " + json.dumps(found))
