"""The frames of structures as Arrow tables of one row per token, in files, and their counts."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from thinsection.errors import StructureError, importing, require
from thinsection.structures.frames import ANGLE_THRESHOLD, FrameOptions, frame_atoms
from thinsection.structures.structure import ATOM, KINDS, Structure, read_structure

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
    Raises MissingDependencyError: pyarrow is not installed.
    """
    with importing("frame tables need pyarrow", "structures"):
        import pyarrow as pa
    options = options or FrameOptions()
    with torch.no_grad():
        frames = frame_atoms(*structure.tensors(), angle_threshold=angle_threshold, options=options)
    here = structure.observed
    tokens = np.arange(structure.num_tokens, dtype=np.int64)
    token_of_atom = np.repeat(tokens.astype(np.int32), structure.token_num_atoms)
    in_chain = np.bincount(structure.token_chain[token_of_atom], weights=here)
    alone = (structure.token_kind == ATOM) & (in_chain[structure.token_chain] < 3)
    valid = frames.valid.numpy() > 0

    def named(codes: Any, names: tuple[str, ...]) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(np.ascontiguousarray(codes)), list(names))

    columns = {
        "structure": named(np.zeros(structure.num_tokens, np.int32), (name,)),
        "token": pa.array(tokens),
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
    return pa.table(columns), _summary(structure, name, valid, alone)


def _summary(structure: Structure, name: str, valid: BoolArray, alone: BoolArray) -> FrameSummary:
    """Counts; `alone` are tokens of one atom in a chain that has too few for a frame."""
    is_atom = structure.token_kind == ATOM
    counted = {"atoms": structure.observed, "atom_tokens": is_atom, "valid_frames": valid}
    counted |= {"too_few_atoms": alone, "near_a_line": is_atom & ~alone & ~valid}
    counted["missing_atoms"] = ~is_atom & ~valid
    sums = {reason: int(tokens.sum()) for reason, tokens in counted.items()}
    chains, tokens = len(structure.chains), structure.num_tokens
    return FrameSummary(structure=name, chains=chains, tokens=tokens, **sums)


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
        assembly, angle_threshold, options: as in `read_structure` and `token_frame_atoms`.

    Memory: one structure and its table at a time.
    Raises InvalidInputError: no structure, another suffix or an angle outside [0, 90];
    StructureError: a file cannot be used; MissingDependencyError: no gemmi or pyarrow.
    """
    require(structure_paths, "structure_paths must name at least one file", "none")
    known, ends = table_path.suffix in _SUFFIXES, " or ".join(_SUFFIXES)
    require(known, f"out must end in {ends}", repr(str(table_path)))
    require(0 <= angle_threshold <= 90, "angle_threshold must be in [0, 90]", angle_threshold)
    with importing("frame tables need pyarrow", "structures"):
        from pyarrow import csv, parquet
    write = csv.CSVWriter if table_path.suffix == ".csv" else parquet.ParquetWriter
    summaries, writer = [], None
    tabled = partial(frame_table, angle_threshold=angle_threshold, options=options)
    with ExitStack() as stack:
        for path in structure_paths:
            name = path.name.removesuffix(".gz").removesuffix(".cif")
            try:
                table, summary = tabled(read_structure(path, assembly=assembly), name)
            except StructureError as error:
                error.add_note(f"structure: {path}")
                raise
            table = _plain(table) if table_path.suffix == ".csv" else table
            writer = writer or stack.enter_context(write(table_path, table.schema))
            writer.write_table(table, _ROW_GROUP)
            summaries.append(summary)
    return summaries


def _plain(table: "pyarrow.Table") -> "pyarrow.Table":
    """Text instead of dictionary codes."""
    import pyarrow as pa

    kinds = ((f, pa.string() if pa.types.is_dictionary(f.type) else f.type) for f in table.schema)
    return table.cast(pa.schema([pa.field(f.name, kind) for f, kind in kinds]))
