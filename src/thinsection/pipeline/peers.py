"""The tools whose folders are written and read."""

from typing import Any

from thinsection.registry import Entry, Registry


def _tool(name: str, help: str, module: str = "peer_layouts") -> Entry:
    return Entry(name=name, help=help, target=f"thinsection.pipeline.{module}:{name.upper()}")


# of `peer_layouts.Layout`
LAYOUTS: Registry[Any] = Registry(
    "layout",
    "thinsection.layouts",
    (
        _tool("trident", "TRIDENT's job_dir: coordinates, features, slide features."),
        _tool("clam", "CLAM's patches, h5_files, pt_files and its lists."),
        _tool("stamp", "STAMP's feature_dir, coordinates in µm, clini and slide tables."),
        _tool("slide2vec", "slide2vec's tilings, tile embeddings and lists.", "peer_slide2vec"),
    ),
)
