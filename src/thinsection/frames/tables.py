"""Frames of structures as tables, in Parquet or CSV.

Legend: T tokens.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from thinsection.errors import (
    InvalidInputError,
    StructureError,
    add_note,
)
from thinsection.extras import importing
from thinsection.frames.mmcif import read_structure
from thinsection.frames.structure import ATOM, KINDS, Structure
from thinsection.frames.token_frames import (
    ANGLE_THRESHOLD,
    FrameOptions,
    frame_atoms,
)

if TYPE_CHECKING:
    import pyarrow

TokenFlags = npt.NDArray[np.bool_]  # (T,)
_SUFFIXES = (".parquet", ".csv")
_ROW_GROUP = 1 << 18  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSummary:
    """Number of tokens that have a frame, and of tokens without one, by reason."""

    structure: str
    chains: int
    atoms: int
    tokens: int
    atom_tokens: int
    valid_frames: int
    too_few_atoms: int
    near_a_line: int
    missing_atoms: int
    notes: str = ""  # parts of the file that were left out


def frame_table(
    structure: Structure,
    name: str,
    *,
    angle_threshold: float = ANGLE_THRESHOLD,
    options: FrameOptions | None = None,
) -> tuple["pyarrow.Table", FrameSummary]:
    """One row per token: its place, the three atoms of its frame, and whether they form a frame.

    Columns are structure, token, chain, residue, insertion (the code beside the residue's number),
    residue_name and kind; for each of a, b and c `atom_*` (name), `residue_*`, `insertion_*` and
    `index_*` (atom slot); then valid and angle (degrees at b; null without three atoms). Names are
    dictionary-encoded.

    Memory: 90 bytes per token for the table, in addition to `token_frame_atoms`.
    Raises MissingDependencyError: pyarrow is not installed.
    """
    with importing("tables of frames", "pyarrow"):
        import pyarrow as pa
    with torch.no_grad():
        frames = frame_atoms(
            *structure.tensors(),
            angle_threshold=angle_threshold,
            options=options or FrameOptions(),
        )
    indices = frames.indices.numpy()
    is_valid = frames.valid.numpy() > 0
    tokens = np.arange(structure.num_tokens, dtype=np.int64)
    token_of_atom = np.repeat(tokens.astype(np.int32), structure.token_num_atoms)
    structure_number = np.zeros(structure.num_tokens, np.int32)
    columns = {
        "structure": _named(structure_number, (name,)),
        "token": pa.array(tokens),
        "chain": _named(structure.token_chain, structure.chains),
        "residue": pa.array(structure.token_residue),
        "insertion": _named(structure.token_insertion, structure.names),
        "residue_name": _named(structure.token_residue_name, structure.names),
        "kind": _named(structure.token_kind, KINDS),
    }
    for letter, index in zip("abc", indices, strict=True):
        token = token_of_atom[index]
        insertion = structure.token_insertion[token]
        columns[f"atom_{letter}"] = _named(structure.atom_name[index], structure.names)
        columns[f"residue_{letter}"] = pa.array(structure.token_residue[token])
        columns[f"insertion_{letter}"] = _named(insertion, structure.names)
        columns[f"index_{letter}"] = pa.array(index)
    # single-atom tokens in a chain with too few observed atoms for a frame
    chain_of_atom = structure.token_chain[token_of_atom]
    observed_in_chain = np.bincount(chain_of_atom, weights=structure.observed)
    few_in_chain = observed_in_chain[structure.token_chain] < 3
    is_alone: TokenFlags = (structure.token_kind == ATOM) & few_in_chain
    no_angle = is_alone | ~structure.observed[indices].all(axis=0)
    angle = np.degrees(np.arccos(np.clip(frames.cos_angle.numpy(), -1, 1)))
    columns["valid"] = pa.array(is_valid)
    columns["angle"] = pa.array(angle, mask=no_angle, type=pa.float32())
    return pa.table(columns), _summary(structure, name, is_valid, is_alone)


def _named(codes: npt.NDArray[np.integer], names: Sequence[str]) -> "pyarrow.Array":
    """A column of names; each distinct name is stored once."""
    import pyarrow as pa

    indices = pa.array(np.ascontiguousarray(codes))
    return pa.DictionaryArray.from_arrays(indices, list(names))


def _summary(
    structure: Structure, name: str, is_valid: TokenFlags, is_alone: TokenFlags
) -> FrameSummary:
    is_atom = structure.token_kind == ATOM
    return FrameSummary(
        structure=name,
        chains=len(structure.chains),
        atoms=int(structure.observed.sum()),
        tokens=structure.num_tokens,
        atom_tokens=int(is_atom.sum()),
        valid_frames=int(is_valid.sum()),
        too_few_atoms=int(is_alone.sum()),
        near_a_line=int((is_atom & ~is_alone & ~is_valid).sum()),
        missing_atoms=int((~is_atom & ~is_valid).sum()),
        notes="; ".join(structure.notes),
    )


def write_frames(
    structure_paths: Sequence[Path],
    table_path: Path,
    *,
    assembly: str | None = None,
    angle_threshold: float = ANGLE_THRESHOLD,
    options: FrameOptions | None = None,
) -> list[FrameSummary]:
    """Write the frames of all structures to one .parquet or .csv; returns a summary for each.

    Args:
        structure_paths: mmCIF files; in the table, each has its file name without suffixes.
        table_path: overwritten; to write atomically, pass a temporary name.
        assembly, angle_threshold, options: as in `read_structure` and `token_frame_atoms`.

    Memory: one structure and its table at a time.
    Raises InvalidInputError: no structure, another suffix or an angle outside [0, 90];
    StructureError: a file cannot be used; MissingDependencyError: no gemmi or pyarrow.
    """
    if not structure_paths:
        raise InvalidInputError("structure_paths must name at least one file, got none")
    if table_path.suffix not in _SUFFIXES:
        raise InvalidInputError(
            f"out must end in {' or '.join(_SUFFIXES)}, got {str(table_path)!r}"
        )
    if not 0 <= angle_threshold <= 90:
        raise InvalidInputError(
            f"angle_threshold must be in [0, 90], got {angle_threshold}"
        )
    with importing("tables of frames", "gemmi", "pyarrow"):
        from pyarrow import csv, parquet
    is_csv = table_path.suffix == ".csv"
    open_writer = csv.CSVWriter if is_csv else parquet.ParquetWriter
    summaries = []
    writer = None
    with ExitStack() as stack:
        for path in structure_paths:
            name = path.name.removesuffix(".gz").removesuffix(".cif")
            try:
                structure = read_structure(path, assembly=assembly)
                table, summary = frame_table(
                    structure, name, angle_threshold=angle_threshold, options=options
                )
            except StructureError as error:
                add_note(error, f"structure: {path}")
                raise
            if is_csv:
                table = _with_text(table)
            if writer is None:
                writer = stack.enter_context(open_writer(table_path, table.schema))
            writer.write_table(table, _ROW_GROUP)
            summaries.append(summary)
    return summaries


def _with_text(table: "pyarrow.Table") -> "pyarrow.Table":
    """The table with its names as text instead of dictionary codes."""
    import pyarrow as pa

    fields = []
    for field in table.schema:
        is_named = pa.types.is_dictionary(field.type)
        fields.append(pa.field(field.name, pa.string() if is_named else field.type))
    return table.cast(pa.schema(fields))
