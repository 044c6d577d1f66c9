"""mmCIF files to tokens as AlphaFold 3 makes them, and assemblies by the file's symmetry."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinsection.errors import MissingDependencyError, StructureError
from thinsection.structures.structure import ATOM, DNA, PROTEIN, RNA, Structure, joined

if TYPE_CHECKING:
    import gemmi

Position = tuple[float, float, float]  # Å
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
        message = "reading mmCIF needs gemmi; pip install 'thinsection[structures]'"
        raise MissingDependencyError(message) from None
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
    structure = _tokenised(model)
    if structure is None:
        raise StructureError(f"structure must hold more than water, got none in {str(path)!r}")
    return structure if assembly is None else _assembled(structure, model, assembly, path)


def _tokenised(model: "gemmi.Structure") -> Structure | None:
    polymers = {
        name
        for entity in model.entities
        if entity.entity_type.name == "Polymer"
        for name in entity.subchains
    }
    builder = _Builder()
    for chain in model[0]:
        for residue in chain.first_conformer():
            if not residue.is_water():
                label = residue.subchain or chain.name
                builder.add(residue, label, label in polymers)
    return builder.finish()


class _Builder:
    """Grows the columns of a Structure residue by residue."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._chains: dict[str, int] = {}
        self._atoms: list[Position] = []
        self._atom_names: list[int] = []
        self._tokens: list[tuple[int, int, int, int, int, int]] = []

    def finish(self) -> Structure | None:
        """None where there was nothing but water."""
        if not self._tokens:
            return None
        columns = np.array(self._tokens, dtype=np.int32).T
        kind, count, chain, residue, residue_name, restype = map(np.ascontiguousarray, columns)
        return Structure(
            atom_positions=np.array(self._atoms, dtype=np.float32),
            atom_name=np.array(self._atom_names, dtype=np.int32),
            token_kind=kind.astype(np.int8),
            token_num_atoms=count,
            token_chain=chain,
            token_residue=residue,
            token_residue_name=residue_name,
            token_restype=restype.astype(np.int8),
            names=tuple(self._names),
            chains=tuple(self._chains),
        )

    def add(self, residue: "gemmi.Residue", label: str, in_polymer: bool) -> None:
        """A residue of the chain of that label."""
        atoms = _likeliest(residue)
        name = "MET" if residue.name == _SELENOMETHIONINE and in_polymer else residue.name
        chain = self._chains.setdefault(label, len(self._chains))
        described = (chain, residue.seqid.num or 0, self._name(residue.name))
        if not in_polymer or name not in _STANDARD:
            slots: tuple[str, ...] = tuple(atoms)
            token = (ATOM, 1, *described, _UNKNOWN if in_polymer else _GAP)
            self._tokens += [token] * len(atoms)
        else:
            kind, restype, template = _STANDARD[name]
            slots = (*template, *(other for other in atoms if other not in template))
            self._tokens.append((kind, len(slots), *described, restype))
        for slot in slots:
            self._atom_names.append(self._name(slot))
            self._atoms.append(atoms.get(slot, (np.nan, np.nan, np.nan)))

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))


def _likeliest(residue: "gemmi.Residue") -> dict[str, Position]:
    """Heavy atoms by name in file order; of alternatives the highest occupancy, then the first."""
    best: dict[str, gemmi.Atom] = {}
    for atom in residue:
        if not atom.is_hydrogen() and atom.occ > getattr(best.get(atom.name), "occ", -np.inf):
            best[atom.name] = atom
    return {name: (atom.pos.x, atom.pos.y, atom.pos.z) for name, atom in best.items()}


def _assembled(
    structure: Structure, model: "gemmi.Structure", assembly: str, path: Path
) -> Structure:
    known = {a.name: a for a in model.assemblies}
    if assembly not in known:
        there = f"{', '.join(known) or 'none'} in {str(path)!r}"
        raise StructureError(f"assembly must be one of {there}, got {assembly!r}")
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
