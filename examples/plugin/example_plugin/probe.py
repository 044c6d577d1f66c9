"""A probe: each tile gets the class whose mean embedding is nearest."""

# --8<-- [start:probe]
import numpy as np

from thinsection.probe import ProbeConfig, ProbeResult, TileSet, classified


def nearest_mean(data: TileSet, config: ProbeConfig) -> ProbeResult:
    """Classify tiles by the nearest class mean."""
    classes = range(data.num_classes)
    train = data.train
    means = np.stack(
        [train.embeddings[train.labels == k].mean(axis=0) for k in classes]
    )
    distances = np.linalg.norm(data.val.embeddings[:, None] - means, axis=2)
    return classified(
        "nearest_mean",
        data,
        distances.argmin(axis=1),
        metric="macro_f1",
        protocol=config.protocol,
        details={},
    )


# --8<-- [end:probe]
