"""Thousands of damaged slides through every reader and through `run`: `make fuzz`.

    python -m tests.slide.fuzz 2000 --seed 1 [--only 17 --keep FOLDER]

A mutant may give px or one of our errors that names it. Another exception, a dead process, more
than 30 CPU-s or 1 GiB ends in exit code 1, with the number that makes the mutant again.
"""

import argparse
import contextlib
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import psutil
import tifffile
from PIL import Image
from tests.fuzz.container_mutants import damage_zarr, mutate_dicom
from tests.support.dicom_slides import DicomKind, write_dicom
from tests.support.mutants import mutate
from tests.support.zarr_slides import ZarrKind, write_ome

from thinsection.errors import ThinsectionError
from thinsection.slide import Slide, open_slide
from thinsection.testing import run_and_measure
from thinsection.testing.slide_contract import KINDS, SIZE, STRIPED
from thinsection.testing.synthetic import (
    PyramidKind,
    position_pixels,
    write_he_slide,
    write_pyramid,
)

MAX_CPU_S, MAX_BYTES, MAX_WAIT_S = 30.0, 1 << 30, 120
_PIECE_PX, _MOST_PIECES = 1024, 40
_RUN_SLIDES = 100  # mutants of one run, beside a sound slide
_MORE = {
    "zstd": PyramidKind(compression="zstd", differences=True),
    "webp": PyramidKind(compression="webp"),
    "jpeg-xl": PyramidKind(compression="jpegxl"),
    "jpeg2000-ycbcr": PyramidKind(compression="jpeg2000", aperio=True, ycbcr_2000=True),
    "turned": PyramidKind(compression="deflate", orientation=6),
    "packbits": PyramidKind(compression="packbits", downsamples=(1,)),
}


def write_good(folder: Path, real: Path | None) -> list[Path]:
    """One sound file of every kind that is read; with `real`, also small real ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in (KINDS | STRIPED | _MORE).items():
        write_pyramid(folder / f"{name}.tif", SIZE, kind)
    pixels = position_pixels(SIZE)
    for mode in ("L", "RGB", "CMYK"):
        Image.fromarray(pixels).convert(mode).save(folder / f"{mode}.jpg")
    turned = Image.Exif()
    turned[274] = 8
    for name in ("exif.jpg", "exif.png"):
        progressive = name.endswith("jpg")
        image = Image.fromarray(pixels)
        image.save(folder / name, exif=turned, progressive=progressive)
    clear = np.dstack([pixels, pixels[..., 0]])
    tifffile.imwrite(
        folder / "rgba.tif", clear, tile=(128, 128), compression="lzw", metadata=None
    )
    for mode in ("L", "LA", "P", "RGB", "RGBA"):
        Image.fromarray(pixels).convert(mode).save(folder / f"{mode}.png")
    (folder / "16.png").write_bytes(
        imagecodecs.png_encode(pixels.astype(np.uint16) * 257)
    )
    grey: dict[str, Any] = {
        "photometric": "minisblack",
        "compression": "jpeg",
        "metadata": None,
    }
    tifffile.imwrite(folder / "grey-jpeg.tif", pixels[..., 0], tile=(128, 128), **grey)
    with tifffile.TiffWriter(folder / "levels-below.ome.tif", bigtiff=True) as writer:
        below: dict[str, Any] = {
            "tile": (128, 128),
            "photometric": "rgb",
            "compression": "deflate",
        }
        facts = {"PhysicalSizeX": 500, "PhysicalSizeXUnit": "nm"}
        facts |= {"PhysicalSizeY": 500, "PhysicalSizeYUnit": "nm"}
        writer.write(pixels, subifds=1, metadata=facts, **below)
        writer.write(pixels[::2, ::2].copy(), subfiletype=1, **below)
    half = pixels[::2, ::2].copy()
    for version in ("0.4", "0.5"):
        kind = ZarrKind(version=version, tile=(128, 128))
        write_ome(folder / f"ome-{version[-1]}.zarr", [pixels, half], kind)
    for syntax in ("explicit", "jpeg", "rle"):
        layers = [[pixels]]
        dicom = DicomKind(syntax=syntax)
        write_dicom(folder / f"{syntax}.dcm", layers, dicom, series="1.2.3")
    if real is not None:
        for name in ("boxes/boxes_0.dcm", "boxes/boxes.tiff", "fluorescence-dapi.ndpi"):
            shutil.copy(real / "other" / name, folder)
    return sorted(folder.iterdir())


def write_mutant(
    good: list[Path], seed: int, number: int, folder: Path
) -> tuple[Path, str]:
    """The mutant of that number, and what was done to it."""
    rng = np.random.default_rng((seed, number))
    source = good[int(rng.integers(len(good)))]
    if source.is_dir():
        path = folder / f"m{number}{source.suffix}"
        shutil.copytree(source, path)
        return path, f"{source.name}: {damage_zarr(path, rng)}"
    change = mutate_dicom if source.suffix == ".dcm" else mutate
    data, how = change(source.read_bytes(), rng)
    folder /= f"m{number}" * (source.suffix == ".dcm")  # a folder of them is one slide
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"m{number}{source.suffix}"
    path.write_bytes(data)
    return path, f"{source.name}: {how}"


def exercise(slide: Slide) -> Iterator[Any]:
    """Everything that a person reads of a slide, each as a thing that may fail alone."""
    from thinsection.qc import tissue_mask

    for level in slide.levels:
        rows, columns = (range(0, n, _PIECE_PX) for n in level.size[::-1])
        for _, (y, x) in zip(range(_MOST_PIECES), product(rows, columns)):
            origin = (round(x * level.downsample), round(y * level.downsample))
            yield lambda o=origin, i=level.index: slide.read_region(
                o, i, (_PIECE_PX, _PIECE_PX)
            )
    yield lambda: slide.thumbnail((300, 300))
    yield lambda: tissue_mask(slide)
    for name in slide.associated_names:
        yield lambda n=name: slide.associated_image(n)


def one(path: Path, reader: str) -> str:
    """What became of a file in one reader; a sentence with 'raw' where it is not as it must be."""
    try:
        with open_slide(path, reader=reader) as slide:
            ends = set()
            for part in exercise(slide):
                try:
                    part()
                except ThinsectionError as error:
                    ends.add(_named(error, path))
            return "/".join(sorted(ends)) or f"px by {slide.reader}"
    except ThinsectionError as error:
        return _named(error, path)
    except BaseException as error:  # noqa: BLE001 - it is what is looked for
        return f"raw {error!r}"


def _named(error: ThinsectionError, path: Path) -> str:
    name = type(error).__name__
    return (
        name if path.name in str(error) else f"raw: does not name the file: {error!r}"
    )


def cpu_seconds() -> float:
    """Of this process and its children, also those that have ended."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, -1))
    total = sum(usage.ru_utime + usage.ru_stime for usage in (own, ended))
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:2])
    return total


def serve(pipe: Any, readers: tuple[str, ...]) -> None:
    """A worker: paths in; what became of each, CPU-seconds and peak bytes out."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # libraries print
    os.dup2(null, 2)
    while path := pipe.recv():
        Path("/proc/self/clear_refs").write_text("5")
        started = cpu_seconds()
        ends = {reader: one(path, reader) for reader in readers}
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) << 10
        pipe.send((ends, cpu_seconds() - started, peak))


@dataclass
class Worker:
    """A process for mutants, started again where one ends it."""

    readers: tuple[str, ...]
    process: Any = None

    def look(self, path: Path) -> tuple[dict[str, str], float, int]:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs, self.readers))
            self.process.start()
            theirs.close()
        try:
            self.pipe.send(path)
            if self.pipe.poll(MAX_WAIT_S):
                found: tuple[dict[str, str], float, int] = self.pipe.recv()
                return found
        except (EOFError, OSError):
            pass
        self.process.kill()
        self.process.join()
        code, self.process = self.process.exitcode, None
        return {"all": f"raw: the process ended, {code} (-9: hung)"}, 0.0, 0

    def close(self) -> None:
        if self.process is not None:
            self.pipe.send(None)
            self.process.join()


def look_at(
    paths: dict[Path, str], readers: tuple[str, ...], counts: Counter[str]
) -> list[str]:
    """What is wrong with how readers end on mutants; `counts` of how they ended."""
    wrong, worker = [], Worker(readers)
    for path, how in paths.items():
        ends, seconds, peak = worker.look(path)
        counts.update(
            f"{reader}: {end.split(':')[0][:40]}" for reader, end in ends.items()
        )
        wrong += [
            f"{path.name} ({how}) {r}: {e}" for r, e in ends.items() if "raw" in e
        ]
        if seconds > MAX_CPU_S or peak > MAX_BYTES:
            wrong.append(
                f"{path.name} ({how}) took {seconds:.1f} CPU-s, {peak >> 20} MiB"
            )
    worker.close()
    return wrong


def run_all(folder: str, sound: str, out: str) -> dict[str, list[str | None]]:
    """One run over mutants and a sound slide: the status and error of each.

    A file that is no slide any more is left out, and a message names it.
    """
    import thinsection

    messages: list[str] = []

    flat: dict[str, Any] = {"tile_px": 64, "tile_mpp": "native", "memory": "256MiB"}
    flat |= {"tile_filter": ("contrast",), "overview": False}  # which reads every tile
    summary = thinsection.run(
        [sound, folder], out=out, until="tiles", on_message=messages.append, **flat
    )
    ends: dict[str, list[str | None]] = {
        result.slide_id: [result.status, result.error] for result in summary.results
    }
    ends |= {
        path.stem: ["left out", None]
        for path in Path(folder).rglob("*.dcm")
        if any(f"no whole-slide images: {path.name}" in line for line in messages)
    }
    return ends


def look_at_run(paths: dict[Path, str], sound: Path, counts: Counter[str]) -> list[str]:
    """What is wrong with how a run over a folder of mutants, and of the sound slide, ends."""
    folder = sound.parent / "mutants"
    with tempfile.TemporaryDirectory() as out:
        arguments = {"folder": str(folder), "sound": str(sound), "out": out}
        try:
            ran = run_and_measure(
                "tests.slide.fuzz", "run_all", timeout_s=1800, **arguments
            )
        except RuntimeError as error:
            return [f"run: raw: it ended: {error}"]
        with (Path(out) / "failed.csv").open() as table:
            rows = table.read()
    wrong, found = [], ran.result
    for path, how in {**paths, sound: "sound"}.items():
        status, error = found.get(path.stem, ("missing", None))
        # the line that a person reads names the file, not the class of the error
        known = path.name in (error or "") and path.stem in rows
        counts[f"run: {status}"] += 1
        if status not in ("done", "empty", "failed", "left out") or (
            status == "failed" and not known
        ):
            wrong.append(f"{path.name} ({how}) run: raw: {status} {error}")
    if found[sound.stem][0] != "done" or len(found) != len(paths) + 1:
        wrong.append(f"run: raw: {found[sound.stem]}, {len(found)} rows")
    if ran.cpu_seconds > MAX_CPU_S * len(paths) or ran.growth_bytes > MAX_BYTES:
        wrong.append(
            f"run of {len(paths)}: {ran.cpu_seconds:.0f} CPU-s, {ran.growth_bytes >> 20} MiB"
        )
    return wrong


def fuzz(
    mutants: range,
    seed: int,
    work: Path,
    real: Path | None,
    readers: tuple[str, ...],
    *,
    run_slides: int = _RUN_SLIDES,
) -> tuple[list[str], Counter[str]]:
    """What is wrong, and how they ended; the mutants of a run go when it is done."""
    wrong, counts = list[str](), Counter[str]()
    good = write_good(work / "good", real)
    sound = work / "sound.svs"
    write_he_slide(sound, (1200, 900), seed=3, downsamples=(1, 4))
    for first in mutants[::run_slides]:
        folder = work / "mutants"
        numbers = range(first, min(first + run_slides, mutants.stop))
        paths = dict(write_mutant(good, seed, number, folder) for number in numbers)
        found = look_at(paths, readers, counts) + look_at_run(paths, sound, counts)
        for line in found:
            say(line)
        wrong += found
        shutil.rmtree(folder)
    return wrong, counts


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """0 where every mutant ended as it must."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mutants", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first mutant"
    )
    parser.add_argument("--readers", default="auto,tiff,openslide,image")
    given = parser.parse_args()
    slides = os.environ.get("THINSECTION_TEST_SLIDES")
    mutants, started = range(given.first, given.first + given.mutants), cpu_seconds()
    with tempfile.TemporaryDirectory() as work:
        readers = tuple(given.readers.split(","))
        real = Path(slides) if slides else None
        wrong, counts = fuzz(mutants, given.seed, Path(work), real, readers)
    for end, number in sorted(counts.items()):
        say(f"{number:6} {end}")
    took = f"{cpu_seconds() - started:.0f} CPU-s"
    say(f"{given.mutants} mutants of seed {given.seed}: {len(wrong)} wrong; {took}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
