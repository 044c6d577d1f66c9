"""Results folders of many finished slides, copied from the records of one that was computed."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from thinsection.files.atomic import read_json
from thinsection.run.run import run
from thinsection.slide.ids import SlideFile, file_key
from thinsection.store.identity import Identity
from thinsection.store.ledger import LEDGER_NAME, SLIDES
from thinsection.store.slide_ids import SLIDE_IDS_NAME
from thinsection.testing.synthetic import write_he_slide

# id of the slide that is computed; no other file has it in its name
MODEL = "computed-slide"
PICTURE_NAME = "picture.jpg"
# stands in the ledger for what is recorded of the slide's file
_SOURCE = "source of a fabricated slide"
# bytes of a fabricated slide; it is sparse, so it takes one block of the disk
_SLIDE_BYTES = 1 << 20
SETTINGS = {
    "encoders": ["efficientnet_lite0"],
    "pretrained": False,
    "device": "cpu",
    "engine": "torch",
}


def fabricate(
    folder: Path, count: int, *, pictures: int, present: int = 0
) -> tuple[Path, Path]:
    """Makes `slides` and `results` in a folder, as after a run of so many slides.

    One slide is generated and computed. The files of the others are links to its files, and their
    ledgers are its ledger with another id and the identity of another file. A file of theirs has
    the size of a slide and no pixels, because a finished slide is not opened. Only the first
    `pictures` slides have a picture, because the index takes some ms to draw a thumbnail of it.

    Args:
        folder: folder of both.
        count: number of slides, the computed one included.
        pictures: number of slides with a picture.
        present: slides that an earlier call with the same `pictures` has made here.

    Returns:
        Folder of the slides, and the results folder.
    """
    slides = folder / "slides"
    out = folder / "results"
    if not present:
        slides.mkdir(parents=True)
        write_he_slide(slides / f"{MODEL}.svs", (1800, 1400), seed=1)
        run([slides], out=out, **SETTINGS)
    files = [path for path in out.glob(f"*/*/{MODEL}.*") if path.is_file()]
    files += (out / SLIDES / MODEL).iterdir()
    files = [path for path in files if path.name != LEDGER_NAME]
    document = read_json(out / SLIDES / MODEL / LEDGER_NAME)
    # a key depends on the content, so the content that is recorded is the model's
    content = document["source"]["source"]
    document["source"] = _SOURCE
    ledger = json.dumps(document, indent=2)
    listed_slides = read_json(out / SLIDE_IDS_NAME)
    ledger_has_picture = True
    for number, slide_id in enumerate(slide_ids(count - 1)):
        if number < present - 1:
            continue
        slide = slides / f"{slide_id}.svs"
        with slide.open("wb") as file:
            file.write(slide_id.encode())
            file.truncate(_SLIDE_BYTES)
        listed_slides[slide_id] = asdict(SlideFile(file_key(str(slide)), slide_id))
        if number >= pictures and ledger_has_picture:
            ledger_has_picture = False
            files = [path for path in files if path.name != PICTURE_NAME]
            ledger = _without_picture(ledger)
        source = asdict(Identity.read(slide, {}, "samples")) | {"source": content}
        text = ledger.replace(MODEL, slide_id)
        text = text.replace(json.dumps(_SOURCE), json.dumps(source))
        _copy_files(out, files, slide_id)
        (out / SLIDES / slide_id / LEDGER_NAME).write_text(text)
    (out / SLIDE_IDS_NAME).write_text(json.dumps(listed_slides))
    return slides, out


def slide_ids(count: int) -> Iterator[str]:
    """Ids of fabricated slides."""
    return (f"slide-{number:05d}" for number in range(count))


def _without_picture(ledger: str) -> str:
    """Ledger that does not name the picture, so that its stage is complete without it."""
    document = json.loads(ledger)
    for record in document["stages"].values():
        for names in (record["files"], record["sums"]):
            for name in list(names):
                if name.endswith(PICTURE_NAME):
                    del names[name]
    return json.dumps(document, indent=2)


def _copy_files(out: Path, files: list[Path], slide_id: str) -> None:
    """Links the files of the computed slide under the names of another."""
    (out / SLIDES / slide_id).mkdir(exist_ok=True)
    for path in files:
        target = out / str(path.relative_to(out)).replace(MODEL, slide_id)
        try:
            os.link(path, target)
        except OSError:
            # a file system allows some tens of thousands of links to one file
            shutil.copyfile(path, target)
