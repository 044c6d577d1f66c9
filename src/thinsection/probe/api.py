"""One call per probe, from paths to a result: what `thinsection probe` runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from thinsection.errors import ConfigError, DatasetError
from thinsection.probe.abmil import abmil_probe
from thinsection.probe.config import ProbeConfig
from thinsection.probe.datasets_cases import labelled_cases, load_case_table, survival_cases
from thinsection.probe.datasets_images import LAYOUTS
from thinsection.probe.datasets_manifest import gather_rows, load_manifest
from thinsection.probe.embedding_files import find_tile_files, read_embeddings
from thinsection.probe.examples import Embeddings, TileSet
from thinsection.probe.fewshot import fewshot_probe
from thinsection.probe.image_sets import (
    ImageRef,
    ImageSet,
    class_and_mean,
    embed_image_set,
    embed_images,
    encoder_facts,
)
from thinsection.probe.knn import knn_probe
from thinsection.probe.linear import linear_probe
from thinsection.probe.protocol import Protocol, get_protocol
from thinsection.probe.regions import load_regions
from thinsection.probe.result import ProbeResult
from thinsection.probe.robustness import RobustnessSet, robustness_probe
from thinsection.probe.slide import slide_probe
from thinsection.probe.subset import at_most_per_class
from thinsection.probe.survival import survival_probe
from thinsection.probe.tables import Row, read_table
from thinsection.probe.tileset import tileset_result
from thinsection.units import parse_bytes

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder

TileProbe = Literal["linear", "knn", "fewshot"]
TILE_PROBES: tuple[TileProbe, ...] = ("linear", "knn", "fewshot")
ROBUSTNESS_COLUMNS = ("slide_id", "biological_class", "medical_center")


def config_protocol(config: ProbeConfig) -> Protocol:
    """The protocol that the configuration names, with its seed."""
    return get_protocol(config.compute.protocol, seed=config.compute.seed)


def load_tiles(path: Path, config: ProbeConfig) -> TileSet:
    """Labelled tile embeddings of a path; images are embedded by the configuration's encoder.

    Args:
        path: a manifest, a dataset folder, a tiles.h5, or a folder of those.
        config: layout, labels, encoder.

    Memory: 12 N D at most while rows are split, 4 N D after; the largest file.

    Raises:
        DatasetError: the data do not look as expected; says what was looked for.
        ConfigError: settings that the data need are missing.
    """
    data, seed = config.data, config_protocol(config).seed
    layout = data.layout if data.layout != "auto" else guess_layout(path, data.labels)
    if layout == "tiles":
        if data.labels is None:
            raise ConfigError(
                f"labels must be given for tile embeddings, got none for {str(path)!r}; "
                "pass --labels regions.geojson (or a CSV slide_id,x,y,label)"
            )
        tiles = load_regions(find_tile_files(path), data.labels, seed=seed)
        return _thinned(tiles, config)
    if layout == "manifest":
        loaded = load_manifest(path, embeddings=data.embeddings, seed=seed)
    else:
        loaded = LAYOUTS[layout](path, seed=seed)
    if isinstance(loaded, TileSet):
        return _thinned(loaded, config)
    if data.max_per_class is not None:  # before the encoder sees them
        loaded = at_most_per_class(loaded, data.max_per_class, seed=seed)
    return _embedded(loaded, config)


def guess_layout(path: Path, labels: Path | None) -> str:
    """'tiles' with labels or for an HDF5 file, 'manifest' for a CSV or TSV, else 'folder'.

    Raises:
        DatasetError: no such path.
    """
    if not path.exists():
        raise DatasetError(f"data must exist, got {str(path)!r}")
    if labels is not None or path.suffix.lower() in (".h5", ".hdf5"):
        return "tiles"
    return "manifest" if path.suffix.lower() in (".csv", ".tsv") else "folder"


def run_tile_probe(probe: TileProbe, tiles: TileSet, config: ProbeConfig) -> ProbeResult:
    """One of the linear, kNN and few-shot probes under the configuration's protocol.

    Memory: see the probe; blocks within the configuration's `memory`.
    """
    protocol, device = config_protocol(config), config.compute.device
    if probe == "linear":
        return linear_probe(tiles, protocol=protocol, device=device)
    budget_bytes = parse_bytes(config.compute.memory, name="memory")
    function = knn_probe if probe == "knn" else fewshot_probe
    return function(tiles, protocol=protocol, device=device, budget_bytes=budget_bytes)


def run_tileset(tiles: TileSet, config: ProbeConfig) -> list[ProbeResult]:
    """The three tile probes and, last, their mean: the tile-set score."""
    results = [run_tile_probe(name, tiles, config) for name in TILE_PROBES]
    return [*results, tileset_result(results)]


def run_slide_probe(
    table_path: Path, config: ProbeConfig, *, method: Literal["logistic", "abmil"] = "logistic"
) -> ProbeResult:
    """Logistic regression on case means, or ABMIL on the tiles of the cases.

    Args:
        table_path: a Patho-Bench task folder, or a CSV slide_id, label[, case_id].
        config: names the folder of embeddings.
        method: which of the two.

    Memory: one case's embeddings + 4 n D.
    """
    protocol, folder = config_protocol(config), _embedding_folder(config)
    table = load_case_table(table_path, protocol, survival=False)
    cases = labelled_cases(table, folder)
    if method == "logistic":
        return slide_probe(cases, protocol=protocol)
    files = table.files(folder)
    device = config.compute.device
    return abmil_probe(cases, files, read_embeddings, protocol=protocol, device=device)


def run_survival_probe(table_path: Path, config: ProbeConfig) -> ProbeResult:
    """Cox regression on case means; see `run_slide_probe` for the paths.

    Memory: one slide's embeddings + 8 (n D + D²).
    """
    protocol = config_protocol(config)
    table = load_case_table(table_path, protocol, survival=True)
    return survival_probe(survival_cases(table, _embedding_folder(config)), protocol=protocol)


def run_robustness_probe(table_path: Path, config: ProbeConfig, *, k: int | None) -> ProbeResult:
    """PathoROB's index of the tiles that a CSV lists (slide_id, biological_class, medical_center).

    Args:
        table_path: with a column `path` of images, which the encoder embeds; or beside a file of
            embeddings, whose rows go with the table's or are named in a column `row`.
        config: names the encoder or the file of embeddings.
        k: instead of the published one of the subset (the table's name).

    Memory: 8 N D + the blocks' budget.

    Raises:
        ConfigError: neither images nor an embeddings file.
        DatasetError: columns or rows are missing.
    """
    rows = read_table(table_path, ROBUSTNESS_COLUMNS)
    columns = [tuple(r[c] for r in rows) for c in ROBUSTNESS_COLUMNS]
    vectors, facts = _robustness_embeddings(table_path, rows, config)
    data = RobustnessSet(
        name=table_path.stem,
        embeddings=vectors,
        slide_id=columns[0],
        biological_class=columns[1],
        medical_center=columns[2],
        facts={"table": table_path.name, **facts},
    )
    return robustness_probe(
        data,
        protocol=config_protocol(config),
        k=k,
        device=config.compute.device,
        budget_bytes=parse_bytes(config.compute.memory, name="memory"),
    )


def _robustness_embeddings(
    table: Path, rows: Sequence[Row], config: ProbeConfig
) -> tuple[Embeddings, dict[str, Any]]:
    file = config.data.embeddings
    if file is None and "path" in rows[0]:
        encoder = _encoder(config)
        encode, words = class_and_mean(encoder)
        images = [ImageRef(table.parent / r["path"]) for r in rows]
        vectors = embed_images(images, encode, batch_size=config.compute.batch_size)
        return vectors, {"embedding": words, **encoder_facts(encoder)}
    if file is None or not file.is_file():
        raise ConfigError(
            f"embeddings must be a file, got {file}; pass --embeddings FILE, or give the table a "
            "column 'path' of images"
        )
    index = [r.get("row") or str(i) for i, r in enumerate(rows)]
    return gather_rows([file] * len(rows), index, table), {"embedding": file.name}


def _thinned(tiles: TileSet, config: ProbeConfig) -> TileSet:
    most = config.data.max_per_class
    if most is None:
        return tiles
    return at_most_per_class(tiles, most, seed=config_protocol(config).seed)


def _embedded(images: ImageSet, config: ProbeConfig) -> TileSet:
    return embed_image_set(images, _encoder(config), batch_size=config.compute.batch_size)


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
