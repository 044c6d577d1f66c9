"""Bonds between residues in an mmCIF file, and the residues that they make into single atoms.

A standard residue that is bonded to something else than its neighbours in the chain, such as a
glycosylated asparagine, is no longer one token: AlphaFold 3 gives each of its atoms one.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from thinsection.structures.residues import Residue

if TYPE_CHECKING:
    import gemmi

LONGEST = 2.4  # Å; a longer bond is none
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
_IDENTITY = "1_555"  # symmetry operation that leaves an atom where it is
# atoms that link the residues of a chain
_PEPTIDE = frozenset(("N", "C"))
_PHOSPHODIESTER = frozenset(("P", "O3'", "O5'"))
# columns of an end of a bond in `_struct_conn`
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
ResidueKey = tuple[str, int, str, str]


class _End(NamedTuple):
    """An end of a bond, found in the file."""

    residue: Residue
    atom: str


class _Finder:
    """Residues by the identifiers that an end of a bond has."""

    def __init__(self, residues: Sequence[Residue]) -> None:
        self._by_key = {residue.key: residue for residue in residues}
        self._by_name: dict[tuple[str, str], list[Residue]] = defaultdict(list)
        for residue in residues:
            self._by_name[residue.chain, residue.name].append(residue)

    def find(
        self, chain: str, number: str, insertion: str, sequence: str, name: str
    ) -> Residue | None:
        """The residue by the author's number, or without it by that in the sequence, if any."""
        if number.lstrip("-").isdigit():
            return self._by_key.get((chain, int(number), insertion, name))
        residues = self._by_name.get((chain, name), [])
        if sequence:
            residues = [r for r in residues if str(r.sequence_number) == sequence]
        return residues[0] if len(residues) == 1 else None


def bonded_residues(
    block: "gemmi.cif.Block", residues: Sequence[Residue], polymers: set[str]
) -> set[ResidueKey]:
    """Keys of the residues with a bond that makes them into single atoms.

    Left out are bonds that leave the asymmetric unit, that are longer than 2.4 Å, of a metal to
    another chain, and between residues of polymers that are not neighbours in one chain (such as
    a disulfide bond); and peptide and phosphodiester bonds.

    Args:
        block: data block of the file.
        residues: those of the first model.
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
    """Whether a metal makes the bond, and its ends; of bonds whose ends are in the file."""
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
    """End of a bond; None where its atom is not in the file, or is a symmetry copy of it."""
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
    """True where a bond between these ends makes single atoms of both residues."""
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
