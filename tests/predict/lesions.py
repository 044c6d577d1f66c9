"""A real slide cut in four, each part with and without a lesion, and models trained on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tests.support.lesion import Box, plant

from thinsection.evaluation.target import Target
from thinsection.predict.bags import Bags
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.heads.head import build_head
from thinsection.predict.inputs import training_inputs
from thinsection.predict.model_file import (
    Member,
    Model,
    ModelCard,
    case_mark,
    save_model,
)
from thinsection.predict.usual import Usual
from thinsection.results.folder import open_results
from thinsection.run.run import run
from thinsection.slide import open_slide
from thinsection.testing.synthetic import PyramidKind, write_levels

BOXES: tuple[Box, ...] = (
    (600, 500, 1250, 1100),
    (900, 300, 1500, 950),
    (500, 700, 1100, 1300),
    (1000, 600, 1600, 1250),
)
HEAD = HeadConfig(hidden_dim=64, attention_dim=32, num_heads=4, dropout=0.0)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What was trained, on what, and what it said of its own folds."""

    model: Path
    slides: tuple[Path, ...]
    results: Path
    held_out: dict[
        str, np.ndarray
    ]  # answers (K,) of the fold that has not seen the slide


def write_parts(source: Path, folder: Path) -> tuple[Path, ...]:
    """Quarters of a slide, each as it is and with a lesion."""
    with open_slide(source, slide_mpp=(0.5, 0.5)) as slide:
        rgb = slide.read_region((0, 0), 0, slide.size)
    height, width = rgb.shape[0] // 2, rgb.shape[1] // 2
    paths = []
    for i, (top, left) in enumerate(((0, 0), (0, width), (height, 0), (height, width))):
        part = rgb[top : top + height, left : left + width]
        for name, shown in (
            (f"case{i}-low", part),
            (f"case{i}-high", plant(part, BOXES[i], i)),
        ):
            paths.append(folder / f"{name}.tif")
            kind = PyramidKind(downsamples=(1, 4), mpp=(0.5, 0.5))
            write_levels(paths[-1], [shown, shown[::4, ::4]], kind)
    return tuple(paths)


def train(
    results: Path, slide_ids: Sequence[str], config: HeadConfig, path: Path
) -> Trained:
    """Two folds, each of which has not seen half of the slides; 'high' in a name is its label."""
    found = open_results(results)
    (address,) = found.features
    files = [results / address / f"{s}.h5" for s in slide_ids]
    with Bags([[file] for file in files], cells=True) as bags:
        read = [bags.read(i) for i in range(len(files))]
    labels = torch.tensor(["high" in s for s in slide_ids]).long()
    tensors = [(torch.from_numpy(b.features), torch.from_numpy(b.cells)) for b in read]
    heads, members = [], []
    held_out: dict[str, np.ndarray] = {}
    target = Target(kind="binary", columns=("grade",), names=("low", "high"))
    for fold in range(2):
        torch.manual_seed(fold)
        head = build_head(config, read[0].features.shape[1], 2)
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
        unseen = [i for i in range(len(files)) if i // 2 % 2 == fold]
        for _ in range(25):
            for i in (i for i in range(len(files)) if i not in unseen):
                optimizer.zero_grad()
                loss = head.loss(
                    head(*tensors[i]), labels[i], torch.nn.functional.cross_entropy
                )
                loss.backward()
                optimizer.step()
        heads.append(head.eval().requires_grad_(False))
        temperature = 1.0 + fold / 2
        marks = tuple(case_mark(slide_ids[i]) for i in unseen)
        members.append(Member(temperature=temperature, held_out=marks))
        for i in unseen:
            logits = head(*tensors[i]).logits.double().numpy()
            held_out[slide_ids[i]] = target.answers(logits[None] / temperature)[0]
    usual = Usual.of(np.stack([bag.features.mean(0, dtype=np.float64) for bag in read]))
    card = ModelCard(
        name="grade",
        head=config,
        target=target,
        inputs=training_inputs(files),
        members=tuple(members),
        floor=usual.floor,
        threshold=usual.threshold,
        data={"cases": len(files)},
        scores={"auroc": 1.0},
    )
    save_model(path, Model(card=card, heads=tuple(heads), usual=usual))
    return Trained(model=path, slides=(), results=results, held_out=held_out)


def trained_on_parts(source: Path, folder: Path, config: HeadConfig = HEAD) -> Trained:
    """Parts of the slide, their embeddings, and a model of two folds."""
    slides = write_parts(source, folder)
    run(slides, out=folder / "results", until="embeddings", overview=False)
    ids = [path.stem for path in slides]
    found = train(folder / "results", ids, config, folder / "grade.safetensors")
    return Trained(
        model=found.model, slides=slides, results=found.results, held_out=found.held_out
    )
