"""Reads structures from mmCIF files with gemmi."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from thinsection.errors import StructureError
from thinsection.extras import importing
from thinsection.frames.residues import (
    Position,
    Residue,
    ResidueKey,
    bonded_residues,
    read_residues,
)
from thinsection.frames.structure import ATOM, DNA, PROTEIN, RNA, Structure, joined

if TYPE_CHECKING:
    import gemmi

_NOT_OBSERVED: Position = (np.nan, np.nan, np.nan)
_UNKNOWN = 20  # residue type of residues that `_STANDARD` does not have
_SELENOMETHIONINE = "MSE"  # AlphaFold 3 reads selenomethionine as methionine
# terminal atoms, for which OpenFold3 has no slot in a standard residue
_TERMINAL = {PROTEIN: "OXT", RNA: "OP3", DNA: "OP3"}


# words in `_chem_comp.type`; the first of these that it contains decides
_KINDS = (
    ("SACCHARIDE", ATOM),
    ("PEPTIDE", PROTEIN),
    ("RNA", RNA),
    ("DNA", DNA),
)


class _Template(NamedTuple):
    """A standard residue: it is one token, and its slots begin with these atoms."""

    restype: int
    atoms: tuple[str, ...]


_AMINO_ACIDS = "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL UNK"
_BACKBONE = ("N", "CA", "C")
_SUGAR = ("P", "OP1", "OP2", "O5'", "C5'", "C4'", "O4'", "C3'", "O3'", "C2'")


def _standard_residues() -> dict[str, _Template]:
    templates = {}
    for number, name in enumerate(_AMINO_ACIDS.split()):
        templates[name] = _Template(number, _BACKBONE)
    for number, name in enumerate(("A", "G", "C", "U", "N"), start=21):
        templates[name] = _Template(number, (*_SUGAR, "O2'", "C1'"))
    for number, name in enumerate(("DA", "DG", "DC", "DT", "DN"), start=26):
        templates[name] = _Template(number, (*_SUGAR, "C1'"))
    return templates


_STANDARD = _standard_residues()


def read_structure(path: Path, *, assembly: str | None = None) -> Structure:
    """Tokens and atoms of the first model, as in OpenFold3, without water and hydrogen.

    The first data block with atoms is read. Of repeated atoms the first is used, and of alternative
    locations the most likely; `notes` name what was left out.

    A standard residue of a polymer (20 amino acids and UNK, 10 nucleotides) is one token. Elsewhere
    every atom is a token of its own: in other residues, ligands and ions, and in a residue that is
    bonded to something other than its neighbours. Unobserved residues have no tokens.

    Args:
        path: .cif or .cif.gz.
        assembly: name of the biological assembly to build; None: atoms as deposited.

    Memory: gemmi's model (about 150 bytes an atom) and 30 bytes per atom, 20 per token of ours.
    Raises StructureError: no mmCIF, no atoms, no such assembly; MissingDependencyError: no gemmi.
    """
    with importing("mmCIF files", "gemmi"):
        import gemmi
    try:
        document = gemmi.cif.read(str(path))
        blocks = [
            block for block in document if len(block.find_values("_atom_site.Cartn_x"))
        ]
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
    structure = _tokenised(model, blocks[0], path)
    if len(blocks) > 1:
        names = ", ".join(block.name for block in blocks[1:])
        note = f"data blocks with atoms after {blocks[0].name!r} are ignored: {names}"
        structure = replace(structure, notes=(note, *structure.notes))
    if assembly is None:
        return structure
    return _assembled(structure, model, assembly, path)


class _Token(NamedTuple):
    """A row of the token columns of `Structure`."""

    kind: int
    num_atoms: int
    chain: int
    residue: int
    insertion: int
    residue_name: int
    restype: int


def _tokenised(
    model: "gemmi.Structure", block: "gemmi.cif.Block", path: Path
) -> Structure:
    """Tokens of all residues except water; names and chains are numbered as they appear."""
    residues, notes = read_residues(model[0])
    kind_of_chain = chain_kinds(block, residues)
    polymers = {chain for chain, kind in kind_of_chain.items() if kind != ATOM}
    bonded = bonded_residues(block, residues, polymers)
    atoms_of_ends = _without_terminal_atoms(residues, kind_of_chain)
    name_numbers = defaultdict[str, int](count().__next__)
    chain_numbers = defaultdict[str, int](count().__next__)
    positions: list[Position] = []
    atom_names: list[int] = []
    tokens: list[_Token] = []
    for residue in residues:
        template = _template(residue.name)
        chain_kind = kind_of_chain[residue.chain]
        slots = atoms_of_ends.get(residue.key) or list(residue.atoms)
        token = _Token(
            kind=ATOM,
            num_atoms=1,
            chain=chain_numbers[residue.chain],
            residue=residue.number,
            insertion=name_numbers[residue.insertion],
            residue_name=name_numbers[residue.name],
            restype=_UNKNOWN if template is None else template.restype,
        )
        if template is None or chain_kind == ATOM or residue.key in bonded:
            tokens.extend([token] * len(slots))
        else:
            others = [atom for atom in slots if atom not in template.atoms]
            slots = [*template.atoms, *others]
            tokens.append(token._replace(kind=chain_kind, num_atoms=len(slots)))
        for slot in slots:
            atom_names.append(name_numbers[slot])
            atom = residue.atoms.get(slot)
            positions.append(_NOT_OBSERVED if atom is None else atom.position)
    if not tokens:
        raise StructureError(
            f"structure must contain more than water, got none in {str(path)!r}"
        )
    table = np.array(tokens, dtype=np.int32)
    kinds, num_atoms, chain, residue_number, insertion, residue_name, restype = map(
        np.ascontiguousarray, table.T
    )
    return Structure(
        atom_positions=np.array(positions, dtype=np.float32),
        atom_name=np.array(atom_names, dtype=np.int32),
        token_kind=kinds.astype(np.int8),
        token_num_atoms=num_atoms,
        token_chain=chain,
        token_residue=residue_number,
        token_insertion=insertion,
        token_residue_name=residue_name,
        token_restype=restype.astype(np.int8),
        names=tuple(name_numbers),
        chains=tuple(chain_numbers),
        notes=notes,
    )


def _template(residue_name: str) -> _Template | None:
    """Template of a standard residue; None for other residues."""
    return _STANDARD.get("MET" if residue_name == _SELENOMETHIONINE else residue_name)


def _without_terminal_atoms(
    residues: Sequence[Residue], kind_of_chain: Mapping[str, int]
) -> dict[ResidueKey, list[str]]:
    """Atoms of terminal standard residues that have an extra terminal atom, without that atom."""
    ends: dict[str, Residue] = {}
    for residue in residues:
        kind = kind_of_chain[residue.chain]
        if kind == PROTEIN:
            ends[residue.chain] = residue  # the last residue
        elif kind != ATOM:
            ends.setdefault(residue.chain, residue)  # the first residue
    atoms = {}
    for chain, residue in ends.items():
        terminal = _TERMINAL[kind_of_chain[chain]]
        if terminal in residue.atoms and _template(residue.name) is not None:
            atoms[residue.key] = [name for name in residue.atoms if name != terminal]
    return atoms


def _assembled(
    whole: Structure, model: "gemmi.Structure", name: str, path: Path
) -> Structure:
    """The biological assembly with this name, made of copies of the deposited chains."""
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


def chain_kinds(
    block: "gemmi.cif.Block", residues: Sequence[Residue]
) -> dict[str, int]:
    """PROTEIN, RNA, DNA or ATOM of each chain.

    A chain with one observed residue is not a polymer. In other chains, each atom votes for the
    type of its residue in the file's `_chem_comp`; with equal votes, the first of these kinds wins.
    If the file does not state a type, gemmi's table of common residues does.

    Source: the molecule types of OpenFold3 0.5.0.
    """
    types = {}
    for row in block.find("_chem_comp.", ["id", "type"]):
        if row.str(1):
            kinds_named = [kind for word, kind in _KINDS if word in row.str(1).upper()]
            types[row.str(0)] = next(iter(kinds_named), ATOM)
    votes: dict[str, Counter[int]] = defaultdict(Counter)
    num_residues = Counter[str]()
    for residue in residues:
        num_residues[residue.chain] += 1
        if residue.name not in types:
            types[residue.name] = _tabulated_kind(residue.name)
        votes[residue.chain][types[residue.name]] += residue.num_atoms
    kinds = {}
    for chain, atoms_of_kind in votes.items():
        kind = max(sorted(atoms_of_kind), key=atoms_of_kind.__getitem__)
        kinds[chain] = kind if num_residues[chain] > 1 else ATOM
    return kinds


def _tabulated_kind(residue_name: str) -> int:
    """Kind of a residue in gemmi's table of common residues."""
    import gemmi

    info = gemmi.find_tabulated_residue(residue_name)
    if info.is_amino_acid():
        return PROTEIN
    if info.is_nucleic_acid():
        return DNA if info.kind == gemmi.ResidueKind.DNA else RNA
    return ATOM
