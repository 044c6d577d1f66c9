"""Residues of an mmCIF file: the likeliest alternative of each, its heavy atoms, each atom once."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import gemmi

Position = tuple[float, float, float]  # Å


class PlacedAtom(NamedTuple):
    """An atom of the chosen alternative."""

    position: Position
    altloc: str  # letter of its alternative; '' where the file has only one


@dataclass(frozen=True, slots=True, kw_only=True)
class Residue:
    """One residue of the file."""

    chain: str  # label_asym_id
    name: str
    number: int  # author's
    insertion: str  # author's insertion code, '' without one
    # number in the polymer's sequence; the author's for what is in none
    sequence_number: int
    atoms: Mapping[str, PlacedAtom]  # heavy, by name, in file order
    num_atoms: int  # with hydrogens
    order: int  # serial number of its first atom

    @property
    def key(self) -> tuple[str, int, str, str]:
        """Chain, author's number with insertion code, and name: no two residues share it."""
        return (self.chain, self.number, self.insertion, self.name)


def read_residues(model: "gemmi.Model") -> tuple[list[Residue], tuple[str, ...]]:
    """Residues but water, in file order, and notes on what was left out.

    Of the alternatives at one place that letter counts whose atoms have the highest sum of
    occupancies, then the first; so of several residues at one place (microheterogeneity) one is
    left. A chain that comes again in the file may repeat residues or bring the rest of one: their
    atoms are put together, and of atoms of the same name and alternative the first counts.
    """
    repeated: list[str] = []
    others: list[str] = []
    residues: list[Residue] = []
    for (chain, place), parts_by_name in _parts_by_place(model).items():
        atoms_by_name = {
            name: _atoms_once(parts, repeated, f"{name} {place} in chain {chain}")
            for name, parts in parts_by_name.items()
        }
        letter = _likeliest_letter(
            [atom for atoms in atoms_by_name.values() for atom in atoms]
        )
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
    """Parts of each residue but water, by chain and number with insertion code, then by name."""
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
    """Atoms of a residue, each name and alternative once; the others are added to `repeated`."""
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


def _likeliest_letter(atoms: "Iterable[gemmi.Atom]") -> str:
    """Letter of the alternative with the highest sum of occupancies; '' without alternatives."""
    sums: dict[str, float] = defaultdict(float)
    for atom in atoms:
        if atom.altloc != "\0":
            sums[atom.altloc] += atom.occ
    return max(sorted(sums), key=lambda letter: sums[letter], default="")
