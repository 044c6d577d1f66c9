"""Residues of an mmCIF file, and the bonds that turn residues into single-atom tokens.

Of each residue, the most likely alternative is read: its heavy atoms, each of them once. A standard
residue that is bonded to something other than its neighbours in the chain, such as a glycosylated
asparagine, is not one token: in AlphaFold 3 each of its atoms is a token.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import gemmi

Position = tuple[float, float, float]  # Å
ResidueKey = tuple[str, int, str, str]
LONGEST = 2.4  # Å; a longer distance is not a bond
_DATIVE = "metalc"
_COVALENT = (
    "covale",
    "covale_base",
    "covale_phosphate",
    "covale_sugar",
    "disulf",
    "modres",
    "modres_link",
)
_IDENTITY = "1_555"  # symmetry operation that does not move an atom
# atoms that link the residues of a chain
_PEPTIDE = frozenset(("N", "C"))
_PHOSPHODIESTER = frozenset(("P", "O3'", "O5'"))
# columns of `_struct_conn` for one end of a bond
_END_COLUMNS = (
    "ptnr{}_label_asym_id",
    "?ptnr{}_auth_seq_id",
    "?pdbx_ptnr{}_PDB_ins_code",
    "?ptnr{}_label_seq_id",
    "ptnr{}_label_comp_id",
    "ptnr{}_label_atom_id",
    "?pdbx_ptnr{}_label_alt_id",
    "?ptnr{}_symmetry",
)


class PlacedAtom(NamedTuple):
    """An atom of the alternative that was chosen."""

    position: Position
    altloc: str  # letter of the alternative; '' if there is only one


@dataclass(frozen=True, slots=True, kw_only=True)
class Residue:
    """One residue of the file."""

    chain: str  # label_asym_id
    name: str
    number: int  # the author's residue number
    insertion: str  # the author's insertion code; '' if there is none
    # number in the polymer's sequence; outside of polymers the author's number
    sequence_number: int
    atoms: Mapping[str, PlacedAtom]  # heavy atoms by name, in file order
    num_atoms: int  # number of atoms, hydrogens included
    order: int  # serial number of its first atom

    @property
    def key(self) -> ResidueKey:
        """Chain, author's number with insertion code, and name: no two residues share it."""
        return (self.chain, self.number, self.insertion, self.name)


def read_residues(model: "gemmi.Model") -> tuple[list[Residue], tuple[str, ...]]:
    """Residues except water, in file order, and notes on what was left out.

    Of the alternatives at one place, the one whose atoms have the highest sum of occupancies is
    used, with ties the first letter. So of several residues at one place (microheterogeneity) one
    is left.
    A chain that appears again in the file may repeat residues or complete one: their atoms are put
    together, and of atoms with the same name and alternative the first is used.
    """
    repeated: list[str] = []
    others: list[str] = []
    residues: list[Residue] = []
    for (chain, place), parts_by_name in _parts_by_place(model).items():
        atoms_by_name = {
            name: _atoms_once(parts, repeated, f"{name} {place} in chain {chain}")
            for name, parts in parts_by_name.items()
        }
        occupancies: dict[str, float] = defaultdict(float)
        for atoms in atoms_by_name.values():
            for atom in atoms:
                if atom.altloc != "\0":
                    occupancies[atom.altloc] += atom.occ
        # with equal sums the first letter; '' if there are no alternatives
        letter = max(sorted(occupancies), key=occupancies.__getitem__, default="")
        for name, atoms in atoms_by_name.items():
            kept = [atom for atom in atoms if atom.altloc in ("\0", letter)]
            if kept:
                residues.append(_residue(chain, parts_by_name[name][0], kept))
            else:
                others.append(f"{name} {place} in chain {chain}")
    residues.sort(key=lambda residue: residue.order)
    notes = []
    if repeated:
        verb = "atom is" if len(repeated) == 1 else "atoms are"
        notes.append(f"{len(repeated)} repeated {verb} ignored, first {repeated[0]}")
    if others:
        verb = "residue is" if len(others) == 1 else "residues are"
        notes.append(
            f"{len(others)} less likely {verb} ignored where the file has several at one place, "
            f"first {others[0]}"
        )
    return residues, tuple(notes)


def _parts_by_place(
    model: "gemmi.Model",
) -> "dict[tuple[str, str], dict[str, list[gemmi.Residue]]]":
    """Parts of residues except water, by chain and place (number, insertion code), by name."""
    places: dict[tuple[str, str], dict[str, list[gemmi.Residue]]] = {}
    for chain in model:
        for residue in chain:
            if not residue.is_water():
                place = (residue.subchain or chain.name, str(residue.seqid))
                by_name = places.setdefault(place, {})
                by_name.setdefault(residue.name, []).append(residue)
    return places


def _atoms_once(
    parts: "Sequence[gemmi.Residue]", repeated: list[str], place: str
) -> "list[gemmi.Atom]":
    """Atoms of a residue, one for each name and alternative; the others are added to `repeated`."""
    atoms: dict[tuple[str, str], gemmi.Atom] = {}
    for part in parts:
        for atom in part:
            if (atom.name, atom.altloc) not in atoms:
                atoms[atom.name, atom.altloc] = atom
            elif not atom.is_hydrogen():
                repeated.append(f"{atom.name} of {place}")
    return list(atoms.values())


def _residue(
    chain: str, part: "gemmi.Residue", atoms: "Sequence[gemmi.Atom]"
) -> Residue:
    heavy = {
        atom.name: PlacedAtom(
            (atom.pos.x, atom.pos.y, atom.pos.z), atom.altloc.strip("\0")
        )
        for atom in atoms
        if not atom.is_hydrogen()
    }
    number = part.seqid.num or 0
    return Residue(
        chain=chain,
        name=part.name,
        number=number,
        insertion=part.seqid.icode.strip(),
        sequence_number=number if part.label_seq is None else part.label_seq,
        atoms=heavy,
        num_atoms=len(atoms),
        order=min(atom.serial for atom in atoms),
    )


class _End(NamedTuple):
    """An end of a bond whose atom is in the file."""

    residue: Residue
    atom: str


class _Finder:
    """Finds residues by the identifiers that a bond gives for its end."""

    def __init__(self, residues: Sequence[Residue]) -> None:
        self._by_key = {residue.key: residue for residue in residues}
        self._by_name: dict[tuple[str, str], list[Residue]] = defaultdict(list)
        for residue in residues:
            self._by_name[residue.chain, residue.name].append(residue)

    def find(
        self, chain: str, number: str, insertion: str, sequence: str, name: str
    ) -> Residue | None:
        """The residue with the author's number, or without one with the sequence number, if any."""
        if number.lstrip("-").isdigit():
            return self._by_key.get((chain, int(number), insertion, name))
        residues = self._by_name.get((chain, name), [])
        if sequence:
            residues = [r for r in residues if str(r.sequence_number) == sequence]
        return residues[0] if len(residues) == 1 else None


def bonded_residues(
    block: "gemmi.cif.Block", residues: Sequence[Residue], polymers: set[str]
) -> set[ResidueKey]:
    """Keys of residues with a bond that makes each of their atoms a token.

    These bonds do not count: bonds that leave the asymmetric unit, bonds longer than 2.4 Å, bonds
    of a metal to another chain, bonds between polymer residues that are not neighbours in one
    chain (such as a disulfide bond), and peptide and phosphodiester bonds.

    Args:
        block: data block of the file.
        residues: residues of the first model.
        polymers: chains that are protein or nucleic acid.

    Source: the bond filter and the tokenizer of OpenFold3 0.5.0, AlphaFold 3's supplement 2.6.
    """
    bonded: set[ResidueKey] = set()
    for is_dative, first, second in _bonds(block, _Finder(residues)):
        if _splits(first, second, polymers, is_dative=is_dative):
            bonded |= {first.residue.key, second.residue.key}
    return bonded


def _bonds(
    block: "gemmi.cif.Block", finder: _Finder
) -> Iterator[tuple[bool, _End, _End]]:
    """Yields whether a bond is to a metal, and its ends, for bonds with both ends in the file."""
    columns = [column.format(end) for end in (1, 2) for column in _END_COLUMNS]
    table = block.find("_struct_conn.", ["conn_type_id", *columns])
    width = len(_END_COLUMNS)
    for row in table:
        kind = row.str(0).lower()
        if kind != _DATIVE and kind not in _COVALENT:
            continue
        first = _end(row, range(1, 1 + width), finder)
        second = _end(row, range(1 + width, 1 + 2 * width), finder)
        if first is not None and second is not None:
            yield kind == _DATIVE, first, second


def _end(
    row: "gemmi.cif.Table.Row", columns: Sequence[int], finder: _Finder
) -> _End | None:
    """End of a bond; None if its atom is not in the file, or the end is a symmetry copy of it."""
    texts = [row.str(column) if row.has(column) else "" for column in columns]
    *identifiers, atom, altloc, symmetry = texts
    if symmetry not in ("", _IDENTITY):
        return None
    residue = finder.find(*identifiers)
    if residue is None or atom not in residue.atoms:
        return None
    states_altloc = row.has(columns[-2])
    if states_altloc and residue.atoms[atom].altloc != altloc:
        return None
    return _End(residue, atom)


def _splits(first: _End, second: _End, polymers: set[str], *, is_dative: bool) -> bool:
    """True if a bond between these ends makes each atom of both residues a token."""
    one, other = first.residue, second.residue
    is_in_chain = one.chain == other.chain
    distance_in_chain = abs(one.sequence_number - other.sequence_number)
    if is_in_chain and distance_in_chain == 0:
        return False
    if is_dative and not is_in_chain:
        return False
    if {one.chain, other.chain} <= polymers and (
        not is_in_chain or distance_in_chain > 1
    ):
        return False
    atoms = {first.atom, second.atom}
    if atoms <= _PEPTIDE or atoms <= _PHOSPHODIESTER:
        return False
    position = one.atoms[first.atom].position
    return math.dist(position, other.atoms[second.atom].position) <= LONGEST
