"""The pictures of the documentation: `make pictures` makes and `docs/pictures/` holds them.

Two real slides (THINSECTION_TEST_SLIDES), some generated ones and a broken one go through a run
with quality control; its pages are photographed in Chromium, its pictures reduced. None is over
150 kB. Where THINSECTION_TEST_GROUNDS is set, quality control also looks at twelve pictures of real
slides that others publish (`benchmarks/real_grounds.toml`).
"""

import os
import shutil
import tempfile
from pathlib import Path

import matplotlib as mpl
from benchmarks.real_grounds import Ground, grounds_folder, read_table
from matplotlib import pyplot
from PIL import Image, ImageDraw
from playwright.sync_api import sync_playwright

import thinsection as ts
from thinsection.files.atomic import write_table
from thinsection.qc import run_qc
from thinsection.qc.tissue import overlay
from thinsection.report.draw import write_drawing as write
from thinsection.report.layers import Outline, Values
from thinsection.report.stored import open_picture, picture_files, read_tissue
from thinsection.results.folder import Results
from thinsection.testing.synthetic import ArraySlide, write_he_slide

OUT = Path(__file__).parent / "pictures"
SLIDES = Path(os.environ.get("THINSECTION_TEST_SLIDES", "slides"))
SMALL, LARGE = "CMU-1-Small-Region", "tcga-cr-7395-01a-01-ts1"
REAL = {SMALL: None, LARGE: 0.5}  # µm/px where the file lacks it
GRID = "256px_0.5mpp_qc-auto"
MOST_BYTES = 150_000
TABLE = "document.querySelector('.tools').scrollIntoView()"
# pictures of real slides whose licences allow a copy, in rows of three
TWELVE = (
    *("kidney-he", "kidney-ihc", "tiatoolbox"),
    *("frame-ihc", "kidney-smears", "biopsy-green"),
    *("cd20-h2ax", "bubble-he", "brain-hd"),
    *("cord-pen", "red-blob", "biopsy-ink"),
)
# width and height of the place of a picture, twice: as it is, and with what was found; in pixels
PLACE_PX = (250, 220)
CARDS = f"document.getElementById('as-cards').click(); {TABLE}"


def save(source: Path, name: str, width: int = 1280) -> None:
    """Writes a picture as JPEG, as well as the bytes allow."""
    OUT.mkdir(exist_ok=True)
    with Image.open(source) as file:
        image = file.convert("RGB")
    image.thumbnail((width, width))
    for quality in range(90, 30, -5):
        image.save(OUT / name, quality=quality, optimize=True)
        if (OUT / name).stat().st_size < MOST_BYTES:
            return
    raise ValueError(f"{name} must be smaller than {MOST_BYTES} bytes")


def cohort(folder: Path) -> Path:
    """A cohort CSV of real, generated and broken slides."""
    rows = []
    for name, mpp in REAL.items():
        shutil.copy(SLIDES / f"{name}.svs", folder)
        rows.append({"slide_path": f"{name}.svs", "slide_mpp": mpp, "label": "skin"})
    for n in range(8):
        path = folder / f"generated {n + 1}.svs"
        write_he_slide(
            path, (1800 + 300 * n, 1500 + 170 * n), seed=20 + n, downsamples=(1, 4)
        )
        rows.append({"slide_path": path.name, "label": "generated"})
    (folder / "truncated.svs").write_bytes(
        (SLIDES / f"{SMALL}.svs").read_bytes()[:50_000]
    )
    rows.append({"slide_path": "truncated.svs", "label": "skin"})
    write_table(folder / "cohort.csv", rows, ("slide_path", "slide_mpp", "label"))
    return folder / "cohort.csv"


def photograph(out: Path, scratch: Path) -> None:
    """The pages of a results folder."""
    shots = {
        "run_page.jpg": ("index.html", "", 1000),
        "run_table.jpg": ("index.html", TABLE, 900),
        "run_cards.jpg": ("index.html", CARDS, 900),
        "qc_page.jpg": ("qc_auto.html", "", 900),
    }
    with sync_playwright() as play:
        chromium = shutil.which("chromium")
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (page, script, height) in shots.items():
            view = browser.new_page(viewport={"width": 1280, "height": height})
            view.goto((out / page).as_uri())
            view.evaluate(script)
            view.wait_for_timeout(500)
            view.screenshot(path=scratch / "shot.png")
            save(scratch / "shot.png", name)
        browser.close()


def photograph_viewer(results: Results, scratch: Path) -> None:
    """The viewer on a slide: its tissue, components of its tiles, those most similar to one."""
    script = "turn(slide.layers.find(one => one.kind === 'colours'), true)"
    ready = "() => slide && viewer.world.getItemAt(0)?.getFullyLoaded()"
    with ts.view(results) as running, sync_playwright() as play:
        chromium = shutil.which("chromium")
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1280, "height": 800})
        view.goto(f"{running.url}#slide={LARGE}")
        view.wait_for_function(ready, timeout=60_000)
        view.evaluate(script)
        view.mouse.click(620, 330)
        view.wait_for_function(
            "() => /^of/.test($('progress').textContent)", timeout=60_000
        )
        view.wait_for_timeout(2000)
        view.screenshot(path=scratch / "shot.png")
        save(scratch / "shot.png", "viewer.jpg")
        browser.close()


def twelve_overlays(folder: Path) -> Image.Image:
    """Pictures of real slides, each beside what `auto` removes and keeps of it."""
    grounds = {ground.name: ground for ground in read_table()}
    width, height = PLACE_PX
    sheet = Image.new("RGB", (6 * width, 4 * (height + 16)), "white")
    for number, name in enumerate(TWELVE):
        left, top = number % 3 * 2 * width, number // 3 * (height + 16)
        ImageDraw.Draw(sheet).text((left + 4, top + 2), name, fill="black")
        for turn, image in enumerate(_before_and_after(grounds[name], folder)):
            image.thumbnail((width - 6, height - 6), Image.Resampling.LANCZOS)
            sheet.paste(image, (left + turn * width, top + 16))
    return sheet


def _before_and_after(ground: Ground, folder: Path) -> tuple[Image.Image, Image.Image]:
    """A picture, and the same with tissue outlined and each check's mask in its colour."""
    rgb = ground.read(folder)
    checked = run_qc(ArraySlide([rgb], slide_mpp=(ground.mpp, ground.mpp)), "auto")
    colors = checked.colors
    tints = ((mask, colors[name]) for name, mask in checked.masks.items())
    drawn = overlay(checked.rgb, checked.mask_use, tints)
    return Image.fromarray(rgb), Image.fromarray(drawn)


def main() -> None:
    """Makes all of them."""
    mpl.use("Agg")
    if (folder := grounds_folder()) is not None:
        with tempfile.TemporaryDirectory() as name:
            twelve_overlays(folder).save(Path(name, "sheet.png"))
            save(Path(name, "sheet.png"), "qc_twelve.jpg", 6 * PLACE_PX[0])
    with tempfile.TemporaryDirectory() as name:
        scratch, slide = Path(name), LARGE
        out = scratch / "results"
        ts.run([cohort(scratch)], out=out, qc="auto", measures=True)
        photograph(out, scratch)
        save(out / GRID / "overviews" / f"{slide}.jpg", "overview.jpg", 1000)
        save(out / GRID / "overviews" / f"{SMALL}.jpg", "qc_overlay.jpg", 1000)
        results = ts.open_results(out)
        photograph_viewer(results, scratch)
        ledger, table = results.ledgers[slide], results.tiles(slide)
        size = tuple(map(int, table.attributes["tile_size_l0"]))
        values = Values(table.coords_l0, size, table.columns["px_focus"], "focus")
        mask = read_tissue(picture_files(ledger.path.parent)[1])
        write(
            scratch / "heatmap.png",
            open_picture(ledger),
            [values, Outline(mask, "tissue")],
        )
        save(scratch / "heatmap.png", "heatmap.jpg", 1000)
        figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
        ts.plot.tiles(results, slide, ax=axes[0])
        ts.plot.embedding(results, color="slide_id", ax=axes[1])
        figure.savefig(scratch / "plot.png", dpi=100)
        save(scratch / "plot.png", "plot.jpg")


if __name__ == "__main__":
    main()
