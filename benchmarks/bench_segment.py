"""What does naming every px of a slide cost, and is it what lavlab-shell itself says?

The same windows through `shell`'s own inputs and runtime and through ours; the map before its
post-processing against its own run on the two real slides; and memory on slides of 1, 4 and 16
times the area. `--peer PYTHON` is an environment with lavlab-shell's own needs (monai, pyvips,
onnxruntime); without it the comparison is left out. Slides: $THINSECTION_TEST_SLIDES.
"""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch

from benchmarks.harness import arguments, finish
from thinsection.segment import load_segmenter, segment
from thinsection.segment.channels import StainChannels
from thinsection.slide import open_slide
from thinsection.testing import run_and_measure
from thinsection.types import MaskFrame

NAMES = ("CMU-1-Small-Region.svs", "tcga-cr-7395-01a-01-ts1.svs")
MPP = 0.5  # of both, so that both programs see the same grid of px
EDGE = 4096  # px of the smallest slide of the memory test
ONE_PX = """
[segmenter]
name = "one-px"
outputs = ["glass", "tissue"]
background = "glass"
mpp = 0.5
px = 512
architecture = "torch.nn:Conv2d"
options = {in_channels = 3, out_channels = 2, kernel_size = 1}
weights = "one.pth"
"""
# its own run, stopped before the post-processing, with what the network was given and answered
PEER = """
import resource, sys, time
import numpy as np
import shell.infer_wsi as run
from shell.model import ONNXModelWrapper
slide, mpp, out = sys.argv[1], float(sys.argv[2]), sys.argv[3]
seen = {}
class Done(Exception): pass
def stop(inner, outer, tissue, *_, **__):
    seen.update(inner=inner, outer=outer, tissue=tissue)
    raise Done
call, fit, apply = ONNXModelWrapper.__call__, run.estimate_stain_params, run.apply_eho_chunked
def network(self, x):
    y = call(self, x)
    seen.setdefault('x', x.numpy().copy()), seen.setdefault('y', y.numpy().copy())
    return y
def fitted(rgb, **k):
    seen['picture'] = rgb
    return fit(rgb, **k)
def applied(rgb, **k):
    found = apply(rgb, **k)
    seen.setdefault('rgb', rgb.copy()), seen.setdefault('eho', found.copy())
    return found
run.post_process, run.estimate_stain_params = stop, fitted
run.apply_eho_chunked, ONNXModelWrapper.__call__ = applied, network
start = time.process_time()
try: run.infer_wsi(slide, out + '.tif', mpp=mpp, device='cpu')
except Done: pass
labels = np.where(seen.pop('inner'), 1, np.where(seen.pop('outer'), 2, 0)).astype(np.uint8)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
np.savez(out, labels=labels, cpu_s=time.process_time() - start, peak=peak, **seen)
"""


def whole_slide(path: str, entry: str, labels: str = "") -> dict[str, Any]:
    """Every px of a slide, one thread; shares of the classes."""
    torch.set_num_threads(1)
    with open_slide(path, slide_mpp=(MPP, MPP)) as slide:
        everywhere = (
            np.ones((1, 1), dtype=bool),
            MaskFrame(size_th=(1, 1), size_l0=slide.size),
        )
        target = Path(labels) if labels else None
        found = segment(
            slide, entry, tissue=everywhere, labels_path=target, memory="128MiB"
        )
    return {"windows": found.num_windows, "fractions": found.fractions}


def peer_run(python: str, path: Path, out: Path) -> dict[str, Any]:
    """What lavlab-shell's own program does; JPEG 2000, which it cannot read, is unpacked first."""
    with open_slide(path, slide_mpp=(MPP, MPP)) as slide:
        plain = out.with_suffix(".plain.tif")
        tifffile.imwrite(
            plain, slide.read_region((0, 0), 0, slide.size), tile=(256, 256)
        )
    env = {
        **os.environ,
        "VIPS_CONCURRENCY": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "",
    }
    command = [python, "-c", PEER, str(plain), str(MPP), str(out)]
    subprocess.run(command, check=True, env=env, capture_output=True)
    with np.load(f"{out}.npz") as file:
        return {name: file[name] for name in file.files}


def compare(theirs: dict[str, Any], labels: Path) -> dict[str, float]:
    """Outputs on its inputs, channels of its pixels, and the map px by px over its tissue."""
    segmenter = load_segmenter("lavlab-shell", device="cpu")
    outputs = segmenter.network(theirs["x"])
    channels = StainChannels.fit(theirs["picture"], "its own picture")
    eho = theirs["eho"].astype(np.float32)
    eho = (eho - eho.min((0, 1))) / np.maximum(eho.max((0, 1)) - eho.min((0, 1)), 1)
    ours = tifffile.imread(labels)
    rows, columns = (
        np.arange(n) * m // n for n, m in zip(ours.shape, theirs["labels"].shape)
    )
    there = np.ix_(rows, columns)
    same = ours == theirs["labels"][there]
    return {
        "largest_difference_of_outputs": float(abs(outputs - theirs["y"]).max()),
        "largest_output": float(abs(theirs["y"]).max()),
        "largest_difference_of_channels": float(
            abs(channels(theirs["rgb"][None])[0].transpose(1, 2, 0) - eho).max()
        ),
        "agreement_on_tissue": float(same[theirs["tissue"][there]].mean()),
    }


def real_slides(python: str, folder: Path) -> dict[str, Any]:
    """Both programs on the real slides, one after the other."""
    results = {}
    for name in NAMES:
        path, labels = (
            Path(os.environ["THINSECTION_TEST_SLIDES"]) / name,
            folder / f"{name}.tif",
        )
        theirs = peer_run(python, path, folder / name) if python else None
        call = {"path": str(path), "entry": "lavlab-shell", "labels": str(labels)}
        ours = run_and_measure("benchmarks.bench_segment", "whole_slide", **call)
        row: dict[str, Any] = {
            "ours_cpu_s": ours.cpu_seconds,
            "ours_peak": ours.peak_bytes,
        }
        if theirs is not None:
            row |= {
                "peer_cpu_s": float(theirs["cpu_s"]),
                "peer_peak": int(theirs["peak"]),
            }
            row |= compare(theirs, labels)
        results[name] = row | ours.result
    return results


def areas(folder: Path, edge: int) -> list[dict[str, Any]]:
    """Peak memory on slides of 1, 4 and 16 times the area, by a network of one px."""
    (folder / "one.toml").write_text(ONE_PX)
    state = {"weight": torch.zeros(2, 3, 1, 1), "bias": torch.tensor([0.0, 1.0])}
    torch.save(state, folder / "one.pth")
    rows = []
    for times in (1, 2, 4):
        size, path = (edge * times, edge * times), folder / f"{times}.tif"
        noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
        parts = (noise for _ in range((size[0] // 512) ** 2))
        options = {"shape": (*size, 3), "dtype": np.uint8, "tile": (512, 512)}
        tifffile.imwrite(
            path, parts, compression="jpeg", photometric="ycbcr", **options
        )
        call = {"path": str(path), "entry": str(folder / "one.toml")}
        found = run_and_measure("benchmarks.bench_segment", "whole_slide", **call)
        row = {"edge_px": edge * times, "peak_bytes": found.peak_bytes}
        rows.append(
            row | {"cpu_s": found.cpu_seconds, "windows": found.result["windows"]}
        )
        path.unlink()
    return rows


def main() -> None:
    args = arguments(
        __doc__ or "", peer="python of an environment with lavlab-shell's needs"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results: dict[str, Any] = {
            "memory": areas(folder, 1024 if args.smoke else EDGE)
        }
        if not args.smoke:
            results["slides"] = real_slides(args.peer or "", folder)
    finish("segment", results, args)


if __name__ == "__main__":
    main()
