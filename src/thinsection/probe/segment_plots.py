"""Pictures of a segmentation probe: predicted masks beside truth, losses over epochs."""

import numpy as np
import numpy.typing as npt

from thinsection.probe import ProbeResult
from thinsection.probe.plots import COLORS, Picture, figure_and_axes, png_bytes
from thinsection.probe.segment import SegmentExamples

OVERLAY = 0.55  # opacity of a class over the image


def segment_pictures(result: ProbeResult, examples: SegmentExamples) -> list[Picture]:
    """Examples and losses.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    return [examples_picture(examples), losses_picture(result)]


def examples_picture(examples: SegmentExamples) -> Picture:
    """One row an image: the image, the truth over it, the prediction over it."""
    rows = [
        np.concatenate([image, overlaid(image, truth), overlaid(image, guess)], axis=1)
        for image, truth, guess in zip(
            examples.images, examples.truth, examples.prediction, strict=True
        )
    ]
    figure, axes = figure_and_axes((6.6, 2.2 * len(rows) + 0.6))
    axes.imshow(np.concatenate(rows))
    edge = examples.images.shape[2]
    axes.set_xticks([edge * (k + 0.5) for k in range(3)], ["image", "truth", "prediction"])
    axes.set_yticks([])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    for c, name in enumerate(examples.class_names[1:], start=1):
        axes.plot([], [], marker="s", linestyle="none", color=class_color(c), label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, fontsize=8, frameon=False)
    caption = "Validation images of the first fold, evenly spaced; background is left clear."
    return Picture("examples", "Predicted masks beside truth", caption, png_bytes(figure))


def losses_picture(result: ProbeResult) -> Picture:
    """Dice loss of training (dashed) and validation over epochs, one colour a fold."""
    figure, axes = figure_and_axes((5.6, 3.4))
    details = result.details
    for i, (train, val) in enumerate(
        zip(details["train_losses"], details["val_losses"], strict=True)
    ):
        epochs, best = range(1, len(train) + 1), details["best_epochs"][i]
        color = COLORS[i % len(COLORS)]
        axes.plot(epochs, train, color=color, linestyle="--", linewidth=1)
        axes.plot(epochs, val, color=color, label=f"fold {i + 1}", linewidth=1.6)
        axes.plot(best, val[best - 1], marker="o", color="black", fillstyle="none", markersize=9)
    axes.set(xlabel="epoch", ylabel="dice loss")
    axes.legend(fontsize=8)
    caption = "Solid: validation; dashed: training. The circle is the epoch that is scored."
    return Picture("losses", "Loss over epochs", caption, png_bytes(figure))


def overlaid(image: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The image (H, W, 3) with each class but 0 tinted."""
    palette = np.array([_rgb(class_color(c)) for c in range(256)], dtype=np.float32)
    opacity = np.where(labels > 0, OVERLAY, 0.0)[..., None]
    mixed: npt.NDArray[np.float64] = image * (1 - opacity) + palette[labels] * opacity
    return mixed.round().astype(np.uint8)


def class_color(label: int) -> str:
    """Of a class >= 1."""
    return COLORS[(label - 1) % len(COLORS)]


def _rgb(color: str) -> list[int]:
    return list(bytes.fromhex(color.removeprefix("#")))
