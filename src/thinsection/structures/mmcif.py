"""Structures from mmCIF files, by gemmi."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from thinsection.errors import StructureError, importing
from thinsection.structures.structure import ATOM, DNA, PROTEIN, RNA, Structure, joined

if TYPE_CHECKING:
    import gemmi

Position = tuple[float, float, float]  # Å
_NOT_OBSERVED: Position = (np.nan, np.nan, np.nan)
_UNKNOWN = 20  # residue types beside those of `_STANDARD`
_GAP = 31
_SELENOMETHIONINE = "MSE"  # AlphaFold 3 reads it as MET


class _Template(NamedTuple):
    """A standard residue: one token, whose slots begin with these atoms."""

    kind: int
    restype: int
    atoms: tuple[str, ...]


_AMINO_ACIDS = (
    "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL"
)
_BACKBONE = ("N", "CA", "C")
_SUGAR = ("P", "OP1", "OP2", "O5'", "C5'", "C4'", "O4'", "C3'", "O3'", "C2'")


def _standard_residues() -> dict[str, _Template]:
    templates = {}
    for number, name in enumerate(_AMINO_ACIDS.split()):
        templates[name] = _Template(PROTEIN, number, _BACKBONE)
    for number, name in enumerate(("A", "G", "C", "U"), start=21):
        templates[name] = _Template(RNA, number, (*_SUGAR, "O2'", "C1'"))
    for number, name in enumerate(("DA", "DG", "DC", "DT"), start=26):
        templates[name] = _Template(DNA, number, (*_SUGAR, "C1'"))
    return templates


_STANDARD = _standard_residues()


def read_structure(path: Path, *, assembly: str | None = None) -> Structure:
    """Tokens and atoms of the first model: no water, no hydrogen, the likeliest alternative.

    Of several data blocks the first with atoms is read, of repeated atoms the first; `notes` name
    the parts that were left out.

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
            f"structure must contain atoms (_atom_site), got none in {str(path)!r}"
        )
    model.setup_entities()
    structure = _tokenised(model, path)
    if len(blocks) > 1:
        names = ", ".join(block.name for block in blocks[1:])
        note = f"data blocks with atoms after {blocks[0].name!r} are ignored: {names}"
        structure = replace(structure, notes=(note, *structure.notes))
    if assembly is None:
        return structure
    return _assembled(structure, model, assembly, path)


def _has_atoms(block: "gemmi.cif.Block") -> bool:
    return len(block.find_values("_atom_site.Cartn_x")) > 0


class _Token(NamedTuple):
    """A row of the token columns of `Structure`."""

    kind: int
    num_atoms: int
    chain: int
    residue: int
    residue_name: int
    restype: int


def _tokenised(model: "gemmi.Structure", path: Path) -> Structure:
    """Every residue of the model but water; names and chains are numbered as they come."""
    polymers = _polymer_chains(model)
    residues, notes = _residues(model)
    name_numbers = defaultdict[str, int](count().__next__)
    chain_numbers = defaultdict[str, int](count().__next__)
    positions: list[Position] = []
    atom_names: list[int] = []
    tokens: list[_Token] = []
    for residue in residues:
        in_polymer = residue.chain in polymers
        template = _template(residue.name) if in_polymer else None
        slots = list(residue.atoms)
        if template is not None:
            others = [atom for atom in slots if atom not in template.atoms]
            slots = [*template.atoms, *others]
        token = _Token(
            kind=ATOM,
            num_atoms=1,
            chain=chain_numbers[residue.chain],
            residue=residue.number,
            residue_name=name_numbers[residue.name],
            restype=_UNKNOWN if in_polymer else _GAP,
        )
        if template is None:
            tokens.extend([token] * len(slots))
        else:
            tokens.append(
                token._replace(
                    kind=template.kind,
                    num_atoms=len(slots),
                    restype=template.restype,
                )
            )
        for slot in slots:
            atom_names.append(name_numbers[slot])
            positions.append(residue.atoms.get(slot, _NOT_OBSERVED))
    if not tokens:
        raise StructureError(
            f"structure must contain more than water, got none in {str(path)!r}"
        )
    table = np.array(tokens, dtype=np.int32)
    kind, num_atoms, chain, residue_number, residue_name, restype = map(
        np.ascontiguousarray, table.T
    )
    return Structure(
        atom_positions=np.array(positions, dtype=np.float32),
        atom_name=np.array(atom_names, dtype=np.int32),
        token_kind=kind.astype(np.int8),
        token_num_atoms=num_atoms,
        token_chain=chain,
        token_residue=residue_number,
        token_residue_name=residue_name,
        token_restype=restype.astype(np.int8),
        names=tuple(name_numbers),
        chains=tuple(chain_numbers),
        notes=notes,
    )


def _polymer_chains(model: "gemmi.Structure") -> set[str]:
    chains: set[str] = set()
    for entity in model.entities:
        if entity.entity_type.name == "Polymer":
            chains.update(entity.subchains)
    return chains


def _template(residue_name: str) -> _Template | None:
    """Template of a residue of a polymer; None where it is modified."""
    return _STANDARD.get("MET" if residue_name == _SELENOMETHIONINE else residue_name)


@dataclass(frozen=True, slots=True)
class _Residue:
    """One residue of the file, its heavy atoms counted once."""

    chain: str
    name: str
    number: int
    atoms: dict[str, Position]


def _residues(model: "gemmi.Structure") -> tuple[list[_Residue], tuple[str, ...]]:
    """Residues of the first model but water, in file order, and notes on repeated atoms.

    A chain that comes again in the file may repeat residues or bring the rest of one: their atoms
    are put together, and of atoms of the same name and alternative the first counts.
    """
    residues = []
    repeated: list[str] = []
    for (chain, number, name), parts in _parts_of_residues(model).items():
        atoms: dict[tuple[str, str], gemmi.Atom] = {}
        for part in parts:
            for atom in part:
                if atom.is_hydrogen():
                    continue
                if (atom.name, atom.altloc) in atoms:
                    repeated.append(f"{atom.name} of {name} {number} in chain {chain}")
                else:
                    atoms[atom.name, atom.altloc] = atom
        heavy = _likeliest(atoms.values())
        residues.append(_Residue(chain, name, parts[0].seqid.num or 0, heavy))
    if not repeated:
        return residues, ()
    verb = "atom is" if len(repeated) == 1 else "atoms are"
    note = f"{len(repeated)} repeated {verb} ignored, first {repeated[0]}"
    return residues, (note,)


def _parts_of_residues(
    model: "gemmi.Structure",
) -> "dict[tuple[str, str, str], list[gemmi.Residue]]":
    """Parts of each residue of the file but water, by chain, number and name."""
    parts: dict[tuple[str, str, str], list[gemmi.Residue]] = {}
    for chain in model[0]:
        for residue in chain.first_conformer():
            if residue.is_water():
                continue
            key = (residue.subchain or chain.name, str(residue.seqid), residue.name)
            parts.setdefault(key, []).append(residue)
    return parts


def _likeliest(atoms: "Iterable[gemmi.Atom]") -> dict[str, Position]:
    """Atoms by name in file order; of alternatives the highest occupancy, then the first."""
    best: dict[str, gemmi.Atom] = {}
    for atom in atoms:
        if atom.name not in best or atom.occ > best[atom.name].occ:
            best[atom.name] = atom
    return {name: (atom.pos.x, atom.pos.y, atom.pos.z) for name, atom in best.items()}


def _assembled(
    whole: Structure, model: "gemmi.Structure", name: str, path: Path
) -> Structure:
    """The biological assembly of that name, of copies of the chains as deposited."""
    assemblies = {assembly.name: assembly for assembly in model.assemblies}
    if name not in assemblies:
        raise StructureError(
            f"assembly must be one of {', '.join(assemblies) or 'none'} in {str(path)!r}, "
            f"got {name!r}"
        )
    parts = []
    copies = Counter[str]()
    for generator in assemblies[name].generators:
        chains = set(generator.subchains)
        asymmetric_unit = whole.of_chains(chains)
        for operator in generator.operators:
            number = max(copies[chain] for chain in chains)
            copies |= Counter(dict.fromkeys(chains, number + 1))
            parts.append(
                asymmetric_unit.placed(
                    operator.transform.mat.tolist(),
                    operator.transform.vec.tolist(),
                    suffix=f"-{number + 1}" if number else "",
                )
            )
    return joined(parts)
