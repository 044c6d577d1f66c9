"""The frames of structures as Arrow tables of one row per token, in files, and their counts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from thinsection.errors import InvalidInputError, MissingDependencyError, StructureError
from thinsection.structures.frames import ANGLE_THRESHOLD, FrameOptions, frame_atoms
from thinsection.structures.mmcif import read_structure
from thinsection.structures.structure import ATOM, KINDS, Structure

if TYPE_CHECKING:
    import pyarrow

BoolArray = npt.NDArray[np.bool_]  # (tokens,)
_SUFFIXES = (".parquet", ".csv")
_ROW_GROUP = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSummary:
    """How many tokens have a frame, and why the others have none."""

    structure: str
    chains: int
    atoms: int
    tokens: int
    atom_tokens: int
    valid_frames: int
    too_few_atoms: int
    near_a_line: int
    missing_atoms: int

    def as_mapping(self) -> dict[str, Any]:
        return asdict(self)


def frame_table(
    structure: Structure,
    name: str,
    *,
    angle_threshold: float = ANGLE_THRESHOLD,
    options: FrameOptions | None = None,
) -> tuple["pyarrow.Table", FrameSummary]:
    """One row per token: where it is, its frame's three atoms, whether they make a frame.

    Columns: structure, token, chain, residue, residue_name, kind, then for a, b and c `atom_*`
    (name), `residue_*` and `index_*` (atom slot), then valid and angle (degrees at b; null
    without a frame's atoms). Names are dictionary-encoded.

    Memory: 70 bytes per token for the table, beside what `token_frame_atoms` needs.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingDependencyError(
            "frame tables need pyarrow; pip install 'thinsection[structures]'"
        ) from None
    batch, x, mask = structure.tensors()
    with torch.no_grad():
        frames = frame_atoms(
            batch, x, mask, angle_threshold=angle_threshold, options=options or FrameOptions()
        )
    token_of_atom = np.repeat(
        np.arange(structure.num_tokens, dtype=np.int32), structure.token_num_atoms
    )
    here = mask.numpy()
    in_chain = np.bincount(structure.token_chain[token_of_atom], weights=here)
    is_atom = structure.token_kind == ATOM
    alone = is_atom & (in_chain[structure.token_chain] < 3)
    valid = frames.valid.numpy() > 0

    def named(codes: Any, names: tuple[str, ...]) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(np.ascontiguousarray(codes)), list(names))

    columns = {
        "structure": named(np.zeros(structure.num_tokens, np.int32), (name,)),
        "token": pa.array(np.arange(structure.num_tokens, dtype=np.int64)),
        "chain": named(structure.token_chain, structure.chains),
        "residue": pa.array(structure.token_residue),
        "residue_name": named(structure.token_residue_name, structure.names),
        "kind": named(structure.token_kind, KINDS),
    }
    indices = frames.indices.numpy()
    for letter, index in zip("abc", indices, strict=True):
        columns[f"atom_{letter}"] = named(structure.atom_name[index], structure.names)
        columns[f"residue_{letter}"] = pa.array(structure.token_residue[token_of_atom[index]])
        columns[f"index_{letter}"] = pa.array(index)
    angle = np.degrees(np.arccos(np.clip(frames.cos_angle.numpy(), -1, 1)))
    no_angle = alone | ~here[indices].all(axis=0)
    columns["valid"] = pa.array(valid)
    columns["angle"] = pa.array(angle, mask=no_angle, type=pa.float32())
    atoms = int(here.sum(dtype=np.float64))
    return pa.table(columns), _summary(structure, name, atoms=atoms, valid=valid, alone=alone)


def _summary(
    structure: Structure, name: str, *, atoms: int, valid: BoolArray, alone: BoolArray
) -> FrameSummary:
    """Counts; `alone` are tokens of one atom in a chain that has too few for a frame."""
    is_atom = structure.token_kind == ATOM
    return FrameSummary(
        structure=name,
        chains=len(structure.chains),
        atoms=atoms,
        tokens=structure.num_tokens,
        atom_tokens=int(is_atom.sum()),
        valid_frames=int(valid.sum()),
        too_few_atoms=int(alone.sum()),
        near_a_line=int((is_atom & ~alone & ~valid).sum()),
        missing_atoms=int((~is_atom & ~valid).sum()),
    )


def write_frames(
    structure_paths: Sequence[Path],
    table_path: Path,
    *,
    assembly: str | None = None,
    angle_threshold: float = ANGLE_THRESHOLD,
    options: FrameOptions | None = None,
) -> list[FrameSummary]:
    """Writes the frames of all structures to one .parquet or .csv and returns a summary of each.

    Args:
        structure_paths: mmCIF files; the table calls each by its name without suffixes.
        table_path: overwritten; write to a temporary name for atomicity.
        assembly: as in `read_structure`.
        angle_threshold: degrees from a line.
        options: of the search.

    Memory: one structure and its table at a time.

    Raises:
        InvalidInputError: no structure, another suffix or an angle outside [0, 90].
        StructureError: a file cannot be used.
        MissingDependencyError: gemmi or pyarrow is not installed.
    """
    if not structure_paths:
        raise InvalidInputError("structure_paths must name at least one file, got none")
    if table_path.suffix not in _SUFFIXES:
        raise InvalidInputError(
            f"out must end in {' or '.join(_SUFFIXES)}, got {str(table_path)!r}"
        )
    if not 0 <= angle_threshold <= 90:
        raise InvalidInputError(f"angle_threshold must be in [0, 90], got {angle_threshold}")
    summaries: list[FrameSummary] = []
    writer = None
    try:
        for path in structure_paths:
            try:
                structure = read_structure(path, assembly=assembly)
                table, summary = frame_table(
                    structure, _name(path), angle_threshold=angle_threshold, options=options
                )
            except StructureError as error:
                error.add_note(f"structure: {path}")
                raise
            writer = writer or _writer(table_path, table)
            writer.write_table(_plain(table, table_path), _ROW_GROUP)
            summaries.append(summary)
    finally:
        if writer is not None:
            writer.close()
    return summaries


def _name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".cif")


def _plain(table: "pyarrow.Table", table_path: Path) -> "pyarrow.Table":
    """For CSV: text instead of dictionary codes."""
    if table_path.suffix != ".csv":
        return table
    import pyarrow as pa

    fields = [
        pa.field(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type)
        for f in table.schema
    ]
    return table.cast(pa.schema(fields))


def _writer(table_path: Path, table: "pyarrow.Table") -> Any:
    import pyarrow.csv
    import pyarrow.parquet

    if table_path.suffix == ".csv":
        return pyarrow.csv.CSVWriter(table_path, _plain(table, table_path).schema)
    return pyarrow.parquet.ParquetWriter(table_path, table.schema)
