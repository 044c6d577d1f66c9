"""A structure as tokens, as AlphaFold 3 makes them, and atoms, from mmCIF; its frames as tables.

Legend: T tokens, A atom slots. A standard residue's slots begin with its frame atoms' template
(N, CA, C; or the nucleotide's backbone), observed or not; its other observed atoms follow.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.errors import StructureError, importing, require
from thinsection.structures.frames import ANGLE_THRESHOLD, FrameOptions, frame_atoms

if TYPE_CHECKING:
    import gemmi
    import pyarrow

PROTEIN, RNA, DNA, ATOM = range(4)
KINDS = ("protein", "rna", "dna", "atom")
_NUM_RESTYPES = 32

Ints = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]  # (tokens,)
Position = tuple[float, float, float]  # Å
_AMINO_ACIDS = (
    "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL"
)
_UNKNOWN, _GAP = 20, 31
_RNA_NAMES = ("A", "G", "C", "U")
_DNA_NAMES = ("DA", "DG", "DC", "DT")
_SUGAR = ("P", "OP1", "OP2", "O5'", "C5'", "C4'", "O4'", "C3'", "O3'", "C2'")
_STANDARD: dict[str, tuple[int, int, tuple[str, ...]]] = {
    **{
        name: (PROTEIN, i, ("N", "CA", "C"))
        for i, name in enumerate(_AMINO_ACIDS.split())
    },
    **{
        name: (RNA, 21 + i, (*_SUGAR, "O2'", "C1'"))
        for i, name in enumerate(_RNA_NAMES)
    },
    **{name: (DNA, 26 + i, (*_SUGAR, "C1'")) for i, name in enumerate(_DNA_NAMES)},
}
_SUFFIXES = (".parquet", ".csv")  # of tables
_ROW_GROUP = 1 << 18
_SELENOMETHIONINE = "MSE"  # AlphaFold 3 reads it as MET


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Tokens and atoms of one structure, tokens in file order, atoms in token order."""

    atom_positions: npt.NDArray[np.float32]  # (A, 3), Å; NaN where not observed
    atom_name: Ints  # (A,) into `names`
    token_kind: npt.NDArray[
        np.int8
    ]  # (T,) PROTEIN, RNA, DNA or ATOM (of a ligand, for example)
    token_num_atoms: Ints  # (T,) slots of each token
    token_chain: Ints  # (T,) into `chains`
    token_residue: Ints  # (T,) residue number in its chain (author numbering)
    token_residue_name: Ints  # (T,) into `names`
    token_restype: npt.NDArray[
        np.int8
    ]  # (T,) 0 to 31, the order of OpenFold3's one-hot
    names: tuple[str, ...]  # of atoms and residues
    chains: tuple[str, ...]  # label_asym_id of each; copies made by symmetry as 'A-2'
    notes: tuple[str, ...] = ()  # on what of the file was left out, a sentence each

    @property
    def num_tokens(self) -> int:
        return len(self.token_kind)

    @property
    def observed(self) -> npt.NDArray[np.bool_]:
        """(A,) whether the atom has a position."""
        return ~np.isnan(self.atom_positions[:, 0])

    def tensors(self) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """(batch, x, atom_mask) for `token_frame_atoms`. Memory: 60 bytes per token, 4 per atom."""
        kind, counts = (
            torch.from_numpy(x) for x in (self.token_kind, self.token_num_atoms)
        )
        restype = torch.zeros((self.num_tokens, _NUM_RESTYPES), dtype=torch.uint8)
        restype.scatter_(1, torch.from_numpy(self.token_restype).long()[:, None], 1)
        names = {
            "is_protein": PROTEIN,
            "is_rna": RNA,
            "is_dna": DNA,
            "is_atomized": ATOM,
        }
        batch = {
            "token_mask": torch.ones(self.num_tokens),
            "num_atoms_per_token": counts,
        }
        batch["start_atom_index"] = counts.long().cumsum(0) - counts
        batch |= {"asym_id": torch.from_numpy(self.token_chain), "restype": restype}
        batch |= {name: (kind == code).int() for name, code in names.items()}
        return (
            batch,
            torch.from_numpy(self.atom_positions),
            torch.from_numpy(self.observed).float(),
        )

    def placed(
        self, rotation: npt.ArrayLike, shift: npt.ArrayLike, suffix: str = ""
    ) -> Self:
        """A copy moved by x -> rotation @ x + shift (float64), its chains renamed by `suffix`."""
        moved = self.atom_positions @ np.asarray(rotation, np.float64).T + np.asarray(
            shift
        )
        chains = tuple(name + suffix for name in self.chains)
        return replace(self, atom_positions=moved.astype(np.float32), chains=chains)

    def of_chains(self, wanted: set[str]) -> Self:
        """Only the chains of these names."""
        keep_chain = np.array([name in wanted for name in self.chains], dtype=bool)
        tokens = keep_chain[self.token_chain]
        atoms = np.repeat(tokens, self.token_num_atoms)
        kept = {
            name: tokens if name.startswith("token_") else atoms for name in _COLUMNS
        }
        columns: dict[str, Any] = {
            name: getattr(self, name)[at] for name, at in kept.items()
        }
        renumber = (np.cumsum(keep_chain) - 1).astype(np.int32)
        columns["token_chain"] = renumber[columns["token_chain"]]
        chains = tuple(name for name in self.chains if name in wanted)
        return replace(self, **columns, chains=chains)


# fields with an entry per token, or per atom
_COLUMNS = [f.name for f in fields(Structure) if f.name.startswith(("token_", "atom_"))]


def joined(parts: list[Structure]) -> Structure:
    """One structure of several that share `names`; each part's chains stay apart."""
    every = ((name, [getattr(part, name) for part in parts]) for name in _COLUMNS)
    columns: dict[str, Any] = {name: np.concatenate(values) for name, values in every}
    num_chains = [len(part.chains) for part in parts]
    offsets = np.repeat(
        np.cumsum([0, *num_chains[:-1]]), [part.num_tokens for part in parts]
    )
    columns["token_chain"] = (columns["token_chain"] + offsets).astype(np.int32)
    return replace(
        parts[0], **columns, chains=tuple(n for part in parts for n in part.chains)
    )


def read_structure(path: Path, *, assembly: str | None = None) -> Structure:
    """Tokens and atoms of the first model: no water, no hydrogen, the likeliest alternative.

    Of several data blocks the first with atoms is read, of repeated atoms the first; `notes` name
    what was left out.

    A residue of the 20 amino acids or a nucleotide of a polymer is one token; every atom of a
    modified residue, ligand or ion is a token of its own. Unobserved residues make none.

    Args:
        path: .cif or .cif.gz.
        assembly: name of a biological assembly of the file to build; None: atoms as deposited.

    Memory: gemmi's model (about 150 bytes an atom) and 30 bytes per atom, 20 per token of ours.
    Raises StructureError: no mmCIF, no atoms, no such assembly; MissingDependencyError: no gemmi.
    """
    with importing("reading mmCIF needs gemmi", "structures"):
        import gemmi
    try:
        document = gemmi.cif.read(str(path))
        blocks = [block for block in document if _has_atoms(block)]
        model = gemmi.make_structure_from_block(blocks[0]) if blocks else None
    except FileNotFoundError:
        raise StructureError(
            f"structure must be an existing file, got {str(path)!r}"
        ) from None
    except (ValueError, RuntimeError, OSError) as error:
        raise StructureError(
            f"structure must be mmCIF, got {str(path)!r}: {error}"
        ) from None
    if model is None or not len(model) or not model[0].count_atom_sites():
        raise StructureError(
            f"structure must hold atoms (_atom_site), got none in {str(path)!r}"
        )
    model.setup_entities()
    structure = _tokenised(model, path)
    if len(blocks) > 1:
        names = ", ".join(block.name for block in blocks[1:])
        note = f"data blocks with atoms after {blocks[0].name!r} are left out: {names}"
        structure = replace(structure, notes=(note, *structure.notes))
    return (
        structure if assembly is None else _assembled(structure, model, assembly, path)
    )


def _tokenised(model: "gemmi.Structure", path: Path) -> Structure:
    """Every residue of the model but water; names and chains are numbered as they come."""
    entities = [
        entity for entity in model.entities if entity.entity_type.name == "Polymer"
    ]
    polymers = {name for entity in entities for name in entity.subchains}
    names, chains = (defaultdict[str, int](count().__next__) for _ in range(2))
    positions, atom_names, tokens = (
        list[Position](),
        list[int](),
        list[tuple[int, ...]](),
    )
    residues, notes = _residues(model)
    for residue in residues:
        label, atoms = residue.label, residue.atoms
        in_polymer = label in polymers
        name = (
            "MET" if residue.name == _SELENOMETHIONINE and in_polymer else residue.name
        )
        described = (chains[label], residue.number, names[residue.name])
        slots = list(atoms)
        if in_polymer and name in _STANDARD:
            kind, restype, template = _STANDARD[name]
            slots = [*template, *(other for other in atoms if other not in template)]
            tokens.append((kind, len(slots), *described, restype))
        else:
            tokens += [(ATOM, 1, *described, _UNKNOWN if in_polymer else _GAP)] * len(
                slots
            )
        atom_names += [names[slot] for slot in slots]
        positions += [atoms.get(slot, (np.nan, np.nan, np.nan)) for slot in slots]
    rule, got = "structure must hold more than water", f"none in {str(path)!r}"
    require(tokens, rule, got, error=StructureError)
    kinds, *columns, restypes = map(
        np.ascontiguousarray, np.array(tokens, dtype=np.int32).T
    )
    names_of = ("token_num_atoms", "token_chain", "token_residue", "token_residue_name")
    arrays: dict[str, Any] = dict(zip(names_of, columns, strict=True))
    arrays |= {
        "token_kind": kinds.astype(np.int8),
        "token_restype": restypes.astype(np.int8),
    }
    arrays["atom_positions"] = np.array(positions, dtype=np.float32)
    arrays["atom_name"] = np.array(atom_names, dtype=np.int32)
    return Structure(**arrays, names=tuple(names), chains=tuple(chains), notes=notes)


def _has_atoms(block: "gemmi.cif.Block") -> bool:
    return len(block.find_values("_atom_site.Cartn_x")) > 0


@dataclass(frozen=True, slots=True)
class _Residue:
    """One residue of the file, its heavy atoms counted once."""

    label: str  # of its chain
    name: str
    number: int
    atoms: dict[str, Position]


def _residues(model: "gemmi.Structure") -> tuple[list[_Residue], tuple[str, ...]]:
    """Residues of the first model but water, in file order, and notes on repeated atoms.

    A chain that comes again in the file may repeat residues or bring the rest of one: their atoms
    are put together, and of atoms of the same name and alternative the first counts.
    """
    parts: dict[tuple[str, str, str], list[gemmi.Residue]] = {}
    for chain in model[0]:
        for residue in chain.first_conformer():
            if not residue.is_water():
                label = residue.subchain or chain.name
                key = (label, str(residue.seqid), residue.name)
                parts.setdefault(key, []).append(residue)
    residues = []
    repeated: list[str] = []
    for (label, number, name), same in parts.items():
        atoms: dict[tuple[str, str], gemmi.Atom] = {}
        for atom in (atom for part in same for atom in part if not atom.is_hydrogen()):
            if (atom.name, atom.altloc) in atoms:
                repeated.append(f"{atom.name} of {name} {number} in chain {label}")
            else:
                atoms[atom.name, atom.altloc] = atom
        heavy = _likeliest(atoms.values())
        residues.append(_Residue(label, name, same[0].seqid.num or 0, heavy))
    if not repeated:
        return residues, ()
    verb = "atom is" if len(repeated) == 1 else "atoms are"
    note = f"{len(repeated)} repeated {verb} left out, first {repeated[0]}"
    return residues, (note,)


def _likeliest(atoms: "Iterable[gemmi.Atom]") -> dict[str, Position]:
    """Atoms by name in file order; of alternatives the highest occupancy, then the first."""
    best: dict[str, gemmi.Atom] = {}
    for atom in atoms:
        if atom.name not in best or atom.occ > best[atom.name].occ:
            best[atom.name] = atom
    return {name: (atom.pos.x, atom.pos.y, atom.pos.z) for name, atom in best.items()}


def _assembled(
    whole: Structure, model: "gemmi.Structure", assembly: str, path: Path
) -> Structure:
    known = {a.name: a for a in model.assemblies}
    rule = f"assembly must be one of {', '.join(known) or 'none'} in {str(path)!r}"
    require(assembly in known, rule, repr(assembly), error=StructureError)
    parts, copies = list[Structure](), Counter[str]()
    for generator in known[assembly].generators:
        wanted = set(generator.subchains)
        asymmetric = whole.of_chains(wanted)
        for operator in generator.operators:
            number = max(copies[chain] for chain in wanted)
            copies |= Counter(dict.fromkeys(wanted, number + 1))
            rotation, shift = (
                operator.transform.mat.tolist(),
                operator.transform.vec.tolist(),
            )
            parts.append(
                asymmetric.placed(rotation, shift, f"-{number + 1}" if number else "")
            )
    return joined(parts)


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
    notes: str = ""  # on what of the file was left out


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
        frames = frame_atoms(
            *structure.tensors(), angle_threshold=angle_threshold, options=options
        )
    here = structure.observed
    tokens = np.arange(structure.num_tokens, dtype=np.int64)
    token_of_atom = np.repeat(tokens.astype(np.int32), structure.token_num_atoms)
    in_chain = np.bincount(structure.token_chain[token_of_atom], weights=here)
    alone = (structure.token_kind == ATOM) & (in_chain[structure.token_chain] < 3)
    valid = frames.valid.numpy() > 0

    def named(codes: Any, names: tuple[str, ...]) -> Any:
        return pa.DictionaryArray.from_arrays(
            pa.array(np.ascontiguousarray(codes)), list(names)
        )

    columns = {"structure": named(np.zeros(structure.num_tokens, np.int32), (name,))}
    columns |= {
        "token": pa.array(tokens),
        "chain": named(structure.token_chain, structure.chains),
    }
    columns["residue"] = pa.array(structure.token_residue)
    columns["residue_name"] = named(structure.token_residue_name, structure.names)
    columns["kind"] = named(structure.token_kind, KINDS)
    indices = frames.indices.numpy()
    for letter, index in zip("abc", indices, strict=True):
        columns[f"atom_{letter}"] = named(structure.atom_name[index], structure.names)
        columns[f"residue_{letter}"] = pa.array(
            structure.token_residue[token_of_atom[index]]
        )
        columns[f"index_{letter}"] = pa.array(index)
    angle = np.degrees(np.arccos(np.clip(frames.cos_angle.numpy(), -1, 1)))
    no_angle = alone | ~here[indices].all(axis=0)
    columns["valid"] = pa.array(valid)
    columns["angle"] = pa.array(angle, mask=no_angle, type=pa.float32())
    return pa.table(columns), _summary(structure, name, valid, alone)


def _summary(
    structure: Structure, name: str, valid: BoolArray, alone: BoolArray
) -> FrameSummary:
    """Counts; `alone` are tokens of one atom in a chain that has too few for a frame."""
    is_atom = structure.token_kind == ATOM
    counted = {
        "atoms": structure.observed,
        "atom_tokens": is_atom,
        "valid_frames": valid,
    }
    counted |= {"too_few_atoms": alone, "near_a_line": is_atom & ~alone & ~valid}
    counted["missing_atoms"] = ~is_atom & ~valid
    sums = {reason: int(tokens.sum()) for reason, tokens in counted.items()}
    chains, tokens = len(structure.chains), structure.num_tokens
    notes = "; ".join(structure.notes)
    return FrameSummary(
        structure=name, chains=chains, tokens=tokens, notes=notes, **sums
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
        assembly, angle_threshold, options: as in `read_structure` and `token_frame_atoms`.

    Memory: one structure and its table at a time.
    Raises InvalidInputError: no structure, another suffix or an angle outside [0, 90];
    StructureError: a file cannot be used; MissingDependencyError: no gemmi or pyarrow.
    """
    require(structure_paths, "structure_paths must name at least one file", "none")
    known, ends = table_path.suffix in _SUFFIXES, " or ".join(_SUFFIXES)
    require(known, f"out must end in {ends}", repr(str(table_path)))
    require(
        0 <= angle_threshold <= 90,
        "angle_threshold must be in [0, 90]",
        angle_threshold,
    )
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

    kinds = (
        (f, pa.string() if pa.types.is_dictionary(f.type) else f.type)
        for f in table.schema
    )
    return table.cast(pa.schema([pa.field(f.name, kind) for f, kind in kinds]))
