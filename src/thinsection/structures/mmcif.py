"""mmCIF files to tokens as AlphaFold 3 makes them, and assemblies by the file's symmetry."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinsection.errors import MissingDependencyError, StructureError
from thinsection.structures.structure import ATOM, DNA, PROTEIN, RNA, Structure, joined

if TYPE_CHECKING:
    import gemmi

_AMINO_ACIDS = (
    *("ALA", "ARG", "ASN", "ASP", "CYS", "GLN", "GLU", "GLY", "HIS", "ILE"),
    *("LEU", "LYS", "MET", "PHE", "PRO", "SER", "THR", "TRP", "TYR", "VAL"),
)
_UNKNOWN, _GAP = 20, 31
_RNA_NAMES = ("A", "G", "C", "U")
_DNA_NAMES = ("DA", "DG", "DC", "DT")
_SUGAR = ("P", "OP1", "OP2", "O5'", "C5'", "C4'", "O4'", "C3'", "O3'", "C2'")
_STANDARD: dict[str, tuple[int, int, tuple[str, ...]]] = {
    **{name: (PROTEIN, i, ("N", "CA", "C")) for i, name in enumerate(_AMINO_ACIDS)},
    **{name: (RNA, 21 + i, (*_SUGAR, "O2'", "C1'")) for i, name in enumerate(_RNA_NAMES)},
    **{name: (DNA, 26 + i, (*_SUGAR, "C1'")) for i, name in enumerate(_DNA_NAMES)},
}
_SELENOMETHIONINE = "MSE"  # AlphaFold 3 reads it as MET


def read_structure(path: Path, *, assembly: str | None = None) -> Structure:
    """Tokens and atoms of the first model: no water, no hydrogen, the likeliest alternative.

    A residue of the 20 amino acids or a nucleotide of a polymer is one token; every atom of a
    modified residue, ligand or ion is a token of its own. Unobserved residues make none.

    Args:
        path: .cif or .cif.gz.
        assembly: name of a biological assembly of the file to build; None: atoms as deposited.

    Memory: gemmi's model (about 150 bytes an atom) and 30 bytes per atom, 20 per token of ours.

    Raises:
        StructureError: no mmCIF, no atoms, or no such assembly.
        MissingDependencyError: gemmi is not installed.
    """
    try:
        import gemmi
    except ImportError:
        raise MissingDependencyError(
            "reading mmCIF needs gemmi; pip install 'thinsection[structures]'"
        ) from None
    try:
        document = gemmi.cif.read(str(path))
        model = gemmi.make_structure_from_block(document[0]) if len(document) else None
    except FileNotFoundError:
        raise StructureError(f"structure must be an existing file, got {str(path)!r}") from None
    except (ValueError, RuntimeError, OSError) as error:
        raise StructureError(f"structure must be mmCIF, got {str(path)!r}: {error}") from None
    if model is None or not len(model) or not model[0].count_atom_sites():
        raise StructureError(f"structure must hold atoms (_atom_site), got none in {str(path)!r}")
    model.setup_entities()
    structure = _Builder().add_model(model).finish(path)
    return structure if assembly is None else _assembled(structure, model, assembly, path)


class _Builder:
    """Grows the columns of a Structure residue by residue."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._chains: dict[str, int] = {}
        self._atoms: list[tuple[float, float, float]] = []
        self._atom_names: list[int] = []
        self._tokens: list[tuple[int, int, int, int, int, int]] = []

    def add_model(self, model: "gemmi.Structure") -> "_Builder":
        polymers = {
            name
            for entity in model.entities
            if entity.entity_type.name == "Polymer"
            for name in entity.subchains
        }
        for chain in model[0]:
            for residue in chain.first_conformer():
                if not residue.is_water():
                    label = residue.subchain or chain.name
                    self._add_residue(residue, label, label in polymers)
        return self

    def finish(self, path: Path) -> Structure:
        if not self._tokens:
            raise StructureError(f"structure must hold more than water, got none in {str(path)!r}")
        columns = np.array(self._tokens, dtype=np.int32).T
        kind, count, chain, residue, residue_name, restype = columns
        return Structure(
            atom_positions=np.array(self._atoms, dtype=np.float32),
            atom_name=np.array(self._atom_names, dtype=np.int32),
            token_kind=kind.astype(np.int8),
            token_num_atoms=count.copy(),
            token_chain=chain.copy(),
            token_residue=residue.copy(),
            token_residue_name=residue_name.copy(),
            token_restype=restype.astype(np.int8),
            names=tuple(self._names),
            chains=tuple(self._chains),
        )

    def _add_residue(self, residue: "gemmi.Residue", label: str, in_polymer: bool) -> None:
        atoms = _likeliest(residue)
        name = "MET" if residue.name == _SELENOMETHIONINE and in_polymer else residue.name
        chain = self._chains.setdefault(label, len(self._chains))
        number, residue_name = residue.seqid.num or 0, self._name(residue.name)
        if not in_polymer or name not in _STANDARD:
            restype = _UNKNOWN if in_polymer else _GAP
            for atom_name, position in atoms.items():
                self._add_atom(atom_name, position)
                self._tokens.append((ATOM, 1, chain, number, residue_name, restype))
            return
        kind, restype, template = _STANDARD[name]
        slots = (*template, *(other for other in atoms if other not in template))
        for slot in slots:
            self._add_atom(slot, atoms.get(slot, (np.nan, np.nan, np.nan)))
        self._tokens.append((kind, len(slots), chain, number, residue_name, restype))

    def _add_atom(self, name: str, position: tuple[float, float, float]) -> None:
        self._atom_names.append(self._name(name))
        self._atoms.append(position)

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))


def _likeliest(residue: "gemmi.Residue") -> dict[str, tuple[float, float, float]]:
    """Heavy atoms by name in file order; of alternatives the highest occupancy, then the first."""
    best: dict[str, tuple[float, tuple[float, float, float]]] = {}
    for atom in residue:
        if atom.is_hydrogen():
            continue
        known = best.get(atom.name)
        if known is None or atom.occ > known[0]:
            best[atom.name] = (atom.occ, (atom.pos.x, atom.pos.y, atom.pos.z))
    return {name: position for name, (_, position) in best.items()}


def _assembled(
    structure: Structure, model: "gemmi.Structure", assembly: str, path: Path
) -> Structure:
    known = {a.name: a for a in model.assemblies}
    if assembly not in known:
        raise StructureError(
            f"assembly must be one of {', '.join(known) or 'none'} in {str(path)!r}, "
            f"got {assembly!r}"
        )
    parts = []
    copies: dict[str, int] = {}
    for generator in known[assembly].generators:
        wanted = set(generator.subchains)
        asymmetric = structure.of_chains(wanted)
        for operator in generator.operators:
            number = max(copies.get(chain, 0) for chain in wanted)
            copies |= dict.fromkeys(wanted, number + 1)
            rotation, shift = operator.transform.mat.tolist(), operator.transform.vec.tolist()
            parts.append(asymmetric.placed(rotation, shift, f"-{number + 1}" if number else ""))
    return joined(parts)
