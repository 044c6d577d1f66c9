"""Kind of each chain of an mmCIF file: protein, RNA, DNA, or none of them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinsection.structures.residues import Residue
from thinsection.structures.structure import ATOM, DNA, PROTEIN, RNA

if TYPE_CHECKING:
    import gemmi

# words of `_chem_comp.type`, the first that it contains decides
_KINDS = (
    ("SACCHARIDE", ATOM),
    ("PEPTIDE", PROTEIN),
    ("RNA", RNA),
    ("DNA", DNA),
)


def chain_kinds(
    block: "gemmi.cif.Block", residues: Sequence[Residue]
) -> dict[str, int]:
    """PROTEIN, RNA, DNA or ATOM of each chain.

    A chain of one observed residue is no polymer. In others each atom votes with the type of its
    residue in the file's `_chem_comp`; of equal votes the first of these kinds counts. gemmi knows
    the types of usual residues where a file does not state them.

    Source: the molecule types of OpenFold3 0.5.0.
    """
    types = {}
    for row in block.find("_chem_comp.", ["id", "type"]):
        if row.str(1):
            types[row.str(0)] = _kind(row.str(1).upper())
    votes: dict[str, Counter[int]] = defaultdict(Counter)
    num_residues = Counter[str]()
    for residue in residues:
        num_residues[residue.chain] += 1
        if residue.name not in types:
            types[residue.name] = _tabulated_kind(residue.name)
        votes[residue.chain][types[residue.name]] += residue.num_atoms
    kinds = {}
    for chain, count in votes.items():
        kind = max(sorted(count), key=count.__getitem__)
        kinds[chain] = kind if num_residues[chain] > 1 else ATOM
    return kinds


def _kind(chemical_type: str) -> int:
    for word, kind in _KINDS:
        if word in chemical_type:
            return kind
    return ATOM


def _tabulated_kind(residue_name: str) -> int:
    """Kind of a residue by gemmi's table of usual ones."""
    import gemmi

    info = gemmi.find_tabulated_residue(residue_name)
    if info.is_amino_acid():
        return PROTEIN
    if info.is_nucleic_acid():
        return DNA if info.kind == gemmi.ResidueKind.DNA else RNA
    return ATOM
