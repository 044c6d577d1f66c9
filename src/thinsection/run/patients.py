"""One embedding for all slides of a patient, from stored embeddings of their tiles or slides."""

import contextlib
import hashlib
import json
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from thinsection.errors import StoreError, slide_boundary
from thinsection.files.tables import open_table
from thinsection.pool.api import encode_side_by_side
from thinsection.pool.encoder import SlideEmbedding, SlideEncoder, TiledSlide
from thinsection.run.pooling import (
    FeaturesFile,
    content_key,
    find_features,
    layout_of,
)
from thinsection.slide.cohort_table import named_columns
from thinsection.slide.ids import KnownIds, assign_ids
from thinsection.stages.config import PoolingConfig
from thinsection.stages.features import result_fields
from thinsection.stages.leaves import compatibility_warnings
from thinsection.store.ledger import SLIDES, load_ledger
from thinsection.store.outcome import SlideResult, Status
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import (
    read_embedded_tiles,
    read_slide_embedding,
    read_tiles,
    write_slide_embedding,
)
from thinsection.types import counted

STAGE = "patients"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatientFiles:
    """Files with the tile embeddings of all slides of a patient."""

    patient_id: str
    # name of the embedding's file, without suffix: the patient's id in safe characters
    file_name: str
    slides: tuple[FeaturesFile, ...]  # by slide id


def write_patients(
    folder: Path,
    encoder: SlideEncoder,
    *,
    pooling: PoolingConfig,
    out: Path | None = None,
    addresses: Collection[str] | None = None,
    on_result: Callable[[SlideResult], None] = lambda result: None,
    on_message: Callable[[str], None] = lambda text: None,
) -> list[SlideResult]:
    """Writes `GRID/patient_features_NAME/PATIENT.h5` for each patient; a result for each.

    `folder` and `out` are those of `aggregate_folder`, which must have pooled the slides before.
    The patient of a slide comes from the cohort of the run, or from the table `pooling.cohort`. A
    bad file only fails its patient. Complete embeddings are skipped. In a results folder, only the
    tile embeddings at `addresses` are pooled; None pools those that `pooling.features` names.

    Memory: 'late' holds the embeddings of at most one slide, 4 N D bytes; 'early' holds those of
    all slides of a patient, twice. The slide encoder's own limit comes on top.

    Raises StoreError: there are no files, or the table has no patients.
    """
    files = find_features(folder.absolute(), out=out, wanted=pooling.features)
    pooled = [file for file in files if slide_folder(file, encoder).is_dir()]
    if addresses is not None:
        home = folder.absolute()
        pooled = [
            file
            for file in pooled
            if file.path.parent.relative_to(home).as_posix() in addresses
        ]
    if pooling.cohort is None:
        patient_of_slide = patients_of_ledgers(folder, pooled)
    else:
        patient_of_slide = patients_of_table(
            Path(pooling.cohort), {file.slide_id for file in pooled}
        )
    results = []
    for patient in group_by_patient(pooled, patient_of_slide, on_message):
        target = target_file(patient, encoder, early=pooling.patients == "early")
        status: Status = "failed"
        reasons: dict[str, str] = {}
        name = f"patient {patient.patient_id}"
        with slide_boundary(name, reasons.__setitem__):
            status = _write_embedding(patient, encoder, pooling, target)
        result = SlideResult(
            slide_id=name,
            slide_path=str(target),
            status=status,
            stage=STAGE if status == "failed" else "",
            error=reasons.get(name, ""),
        )
        on_result(result)
        results.append(result)
    return results


def slide_folder(file: FeaturesFile, encoder: SlideEncoder) -> Path:
    """Folder of the slide embeddings that the encoder makes of the file."""
    label = encoder.label(file.path.parent.name.removeprefix("features_"))
    return file.out / f"slide_features_{label}"


def target_file(patient: PatientFiles, encoder: SlideEncoder, *, early: bool) -> Path:
    """File of a patient's embedding: `GRID/patient_features_NAME/PATIENT.h5`, or `NAME_early`."""
    slides_folder = slide_folder(patient.slides[0], encoder)
    name = slides_folder.name.removeprefix("slide_features_")
    ending = "_early" if early else ""
    folder = slides_folder.parent / f"patient_features_{name}{ending}"
    return folder / f"{patient.file_name}.h5"


def group_by_patient(
    files: Iterable[FeaturesFile],
    patient_of_slide: Mapping[str, str],
    on_message: Callable[[str], None] = lambda text: None,
) -> list[PatientFiles]:
    """Files of each patient, for each folder of tile embeddings.

    A slide without a patient counts as a patient of its own.
    """
    groups: dict[tuple[Path, str], list[FeaturesFile]] = defaultdict(list)
    slides_without_patient = set()
    for file in files:
        patient = patient_of_slide.get(file.slide_id)
        if patient is None:
            slides_without_patient.add(file.slide_id)
        groups[file.path.parent, patient or file.slide_id].append(file)
    if slides_without_patient:
        on_message(
            f"{counted(len(slides_without_patient), 'slide')} without a patient in the cohort, "
            f"such as {min(slides_without_patient)!r}: each counts as a patient of its own"
        )
    file_names = assign_ids({patient: patient for _, patient in groups}, {})
    return [
        PatientFiles(
            patient_id=patient,
            file_name=file_names[patient],
            slides=tuple(sorted(slides, key=lambda file: file.slide_id)),
        )
        for (_, patient), slides in sorted(groups.items())
    ]


def patients_of_ledgers(folder: Path, files: Iterable[FeaturesFile]) -> dict[str, str]:
    """Patient of each slide, by the ledgers of a results folder; other folders have none."""
    patients = {}
    if (folder / SLIDES).is_dir():
        for slide_id in {file.slide_id for file in files}:
            patient = load_ledger(folder, slide_id).slide.get("patient_id")
            if patient:
                patients[slide_id] = str(patient)
    return patients


def patients_of_table(table: Path, slides: Iterable[str]) -> dict[str, str]:
    """Patient of each slide of a table with slide_id or slide_path, and case_id or patient_id.

    Raises StoreError: no row has both.
    """
    patient_by_text = {}
    for row in open_table(table, error=StoreError).rows:
        columns = named_columns(row)
        slide = columns["slide_id"] or columns["slide_path"]
        if slide and columns["patient_id"]:
            patient_by_text[slide] = columns["patient_id"]
    if not patient_by_text:
        raise StoreError(
            "cohort must have rows with slide_id (or slide_path) and case_id (or patient_id), got "
            f"none in {str(table)!r}"
        )
    ids = KnownIds(slides).match(patient_by_text, repr(str(table)))
    return {slide: patient_by_text[text] for text, slide in ids.items()}


def _write_embedding(
    patient: PatientFiles,
    encoder: SlideEncoder,
    pooling: PoolingConfig,
    target: Path,
) -> Literal["done", "skipped", "empty"]:
    """Writes the embedding, unless it is complete or the patient has no tiles."""
    if pooling.patients == "late" and encoder.fuses_embeddings:
        embeddings = _stored_embeddings(patient, encoder)
        hashes = {
            slide_id: hashlib.sha256(embedding.tobytes()).hexdigest()
            for slide_id, embedding in embeddings.items()
        }
    else:
        hashes = _hashes_of_tiles(patient, encoder, pooling)
    if not hashes:
        return "empty"
    deciding_values = {
        "fusion": pooling.patients,
        "slide_encoder": result_fields(encoder.identity),
        "slides": hashes,
    }
    text = json.dumps(deciding_values, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()
    # raised if there is no embedding yet
    with contextlib.suppress(StoreError):
        if read_slide_embedding(target).attributes.get("key") == key:
            return "skipped"
    if pooling.patients == "late" and encoder.fuses_embeddings:
        embedding = encoder.fuse(np.stack(list(embeddings.values())))
    else:
        slides = _tiled_slides(patient, hashes, pooling)
        if pooling.patients == "late":
            embedding = encoder.encode_case(slides)
        else:
            embedding = encode_side_by_side(encoder, list(slides))
    attributes = {
        "name": patient.patient_id,
        "slide_encoder": encoder.name,
        "weights_hash": encoder.weights_hash or "",
        "fusion": pooling.patients,
        "slides": json.dumps(list(hashes)),
        "key": key,
    }
    write_slide_embedding(target, embedding, attributes)
    return "done"


def _stored_embeddings(
    patient: PatientFiles, encoder: SlideEncoder
) -> dict[str, SlideEmbedding]:
    """Stored slide embeddings, by slide id; a slide without tiles has none.

    Raises StoreError: a slide has tiles, but no embedding.
    """
    embeddings = {}
    for file in patient.slides:
        path = slide_folder(file, encoder) / f"{file.slide_id}.h5"
        if path.is_file():
            embeddings[file.slide_id] = read_slide_embedding(path).slide_embedding
        elif len(read_tiles(file.path, embeddings=False)):
            raise StoreError(
                "all slides of a patient must have an embedding, got none for "
                f"{file.slide_id!r}; see why it failed, and run the same command again"
            )
    return embeddings


def _hashes_of_tiles(
    patient: PatientFiles, encoder: SlideEncoder, pooling: PoolingConfig
) -> dict[str, str]:
    """Hash of all that the tiles of each slide contribute, by slide id."""
    hashes = {}
    for file in patient.slides:
        tiles = read_tiles(file.path, embeddings=False)
        if len(tiles):
            # refuses tiles that do not fit; `aggregate` has shown the warnings before
            compatibility_warnings(tiles, encoder, file.path)
            layout = layout_of(tiles, file, pooling)
            rows = EmbeddingRows(file.path)
            hashes[file.slide_id] = content_key(rows, tiles.coords_l0, encoder, layout)
    return hashes


def _tiled_slides(
    patient: PatientFiles, slide_ids: Iterable[str], pooling: PoolingConfig
) -> Iterator[TiledSlide]:
    """Tile embeddings, coordinates and layout of these slides, read one after another."""
    for file in patient.slides:
        if file.slide_id in slide_ids:
            tiles = read_embedded_tiles(file.path)
            yield tiles.embeddings, tiles.coords_l0, layout_of(tiles, file, pooling)
