"""From the path that a person names to the set that a probe takes."""

from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.errors import ConfigError, DatasetError
from thinsection.probe.config import ProbeConfig
from thinsection.probe.data.cases import labelled_cases, load_case_table, survival_cases
from thinsection.probe.data.files import find_tile_files, is_results
from thinsection.probe.data.images import (
    class_and_mean,
    embed_image_set,
    embed_images,
    encoder_facts,
)
from thinsection.probe.data.layouts import LAYOUTS
from thinsection.probe.data.manifests import gather_rows, load_manifest
from thinsection.probe.data.regions import load_regions
from thinsection.probe.data.sets import (
    CaseSet,
    ImageRef,
    ImageSet,
    RobustnessSet,
    SurvivalSet,
    TileSet,
    at_most_per_class,
)
from thinsection.probe.data.tables import TABLE_SUFFIXES, read_table

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder

ROBUSTNESS_COLUMNS = ("slide_id", "biological_class", "medical_center")


def load_tiles(path: Path, config: ProbeConfig) -> TileSet:
    """Labelled tile embeddings of a path; images are embedded by the configuration's encoder.

    Args:
        path: a manifest, a dataset folder, a file or folder of tile embeddings, or a results
            folder with one encoder's.
        config: layout, labels, encoder.

    Memory: 12 N D at most while rows are split, 4 N D after; the largest file.

    Raises:
        DatasetError: the data do not look as expected; says what was looked for.
        ConfigError: settings that the data need are missing.
    """
    loaded = _labelled(path, config)
    if config.data.max_per_class is not None:  # before the encoder sees them
        most, seed = config.data.max_per_class, config.protocol.seed
        loaded = at_most_per_class(loaded, most, seed=seed)
    if isinstance(loaded, TileSet):
        return loaded
    return embed_image_set(loaded, _encoder(config), batch_size=config.compute.batch_size)


def _labelled(path: Path, config: ProbeConfig) -> TileSet | ImageSet:
    data, seed = config.data, config.protocol.seed
    layout = data.layout if data.layout != "auto" else guess_layout(path, data.labels)
    if layout == "manifest":
        return load_manifest(path, embeddings=data.embeddings, seed=seed)
    if layout != "tiles" and not is_results(path):
        return LAYOUTS[layout](path, seed=seed)
    files = find_tile_files(path)
    if data.labels is None:
        raise ConfigError(
            f"labels must be given for tile embeddings, got none for {str(path)!r}; "
            "pass --labels regions.geojson (or a table slide_id,x,y,label)"
        )
    return load_regions(files, data.labels, seed=seed)


def guess_layout(path: Path, labels: Path | None) -> str:
    """'tiles' with labels or for embeddings, 'manifest' for a table, else 'folder'.

    Raises:
        DatasetError: no such path.
    """
    if not path.exists():
        raise DatasetError(f"data must exist, got {str(path)!r}")
    if labels is not None or path.suffix.lower() in (".h5", ".hdf5"):
        return "tiles"
    if path.suffix.lower() in TABLE_SUFFIXES:
        return "manifest"
    return "tiles" if is_results(path) or any(path.glob("*.h5")) else "folder"


def load_cases(path: Path, config: ProbeConfig) -> CaseSet:
    """Labelled cases of a Patho-Bench task folder or a table slide_id, label[, case_id].

    Memory: one slide's embeddings + 4 n D.

    Raises:
        ConfigError: no folder of embeddings.
        DatasetError: columns or slides are missing.
    """
    folder = _embedding_folder(config)
    return labelled_cases(load_case_table(path, config.protocol, survival=False), folder)


def load_survival(path: Path, config: ProbeConfig) -> SurvivalSet:
    """Cases with event and time; see `load_cases`.

    Memory: one slide's embeddings + 4 n D.
    """
    folder = _embedding_folder(config)
    return survival_cases(load_case_table(path, config.protocol, survival=True), folder)


def load_robustness(path: Path, config: ProbeConfig) -> RobustnessSet:
    """The tiles that a table lists (slide_id, biological_class, medical_center).

    Args:
        path: with a column `path` of images, which the encoder embeds; or beside a file of
            embeddings, whose rows go with the table's or are named in a column `row`.
        config: names the encoder or the file of embeddings.

    Memory: 4 N D + what embeds the images.

    Raises:
        ConfigError: neither images nor an embeddings file.
        DatasetError: columns or rows are missing.
    """
    rows = read_table(path, ROBUSTNESS_COLUMNS)
    file = config.data.embeddings
    if file is None and "path" in rows[0]:
        encoder = _encoder(config)
        encode, words = class_and_mean(encoder)
        images = [ImageRef(path.parent / r["path"]) for r in rows]
        vectors = embed_images(images, encode, batch_size=config.compute.batch_size)
        facts = {"embedding": words, **encoder_facts(encoder)}
    elif file is None or not file.is_file():
        raise ConfigError(
            f"embeddings must be a file, got {file}; pass --embeddings FILE, or give the table a "
            "column 'path' of images"
        )
    else:
        index = [r.get("row") or str(i) for i, r in enumerate(rows)]
        vectors = gather_rows([file] * len(rows), index, path)
        facts = {"embedding": file.name}
    columns = {name: tuple(r[name] for r in rows) for name in ROBUSTNESS_COLUMNS}
    facts = {"table": path.name, **facts}
    return RobustnessSet(name=path.stem, embeddings=vectors, facts=facts, **columns)


def _encoder(config: ProbeConfig) -> "TileEncoder":
    from thinsection.encode import DEFAULT_ENCODER, load_encoder

    return load_encoder(
        config.data.encoder or DEFAULT_ENCODER,
        device=config.compute.device,
        precision=config.compute.precision,
    )


def _embedding_folder(config: ProbeConfig) -> Path:
    folder = config.data.embeddings
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"embeddings must be a folder of slides, got {folder}; pass --embeddings DIR "
            "(a run's output, or TRIDENT's feature folder)"
        )
    return folder
