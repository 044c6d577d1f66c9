"""mmCIF files of a few residues, with all that the tokens of OpenFold3 depend on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# heavy atoms as the chemical component dictionary orders them, cut short where none matters
ATOMS = {
    "GLY": "N CA C O",
    "ALA": "N CA C O CB",
    "SER": "N CA C O CB OG",
    "CYS": "N CA C O CB SG",
    "ASN": "N CA C O CB CG OD1 ND2",
    "LYS": "N CA C O CB CG CD CE NZ",
    "UNK": "N CA C O CB",
    "SEP": "N CA C O CB OG P O1P O2P O3P",
    "NAG": "C1 C2 C3 C4 C5 C6 N2 O3 O4 O5 O6 C7 C8 O7",
    "ZN": "ZN",
    "SO4": "S O1 O2 O3 O4",
}
_BASE = "P OP1 OP2 O5' C5' C4' O4' C3' O3' C2' "
ATOMS |= dict.fromkeys(("A", "G", "C", "U", "N"), _BASE + "O2' C1' N1")
ATOMS |= dict.fromkeys(("DA", "DG", "DC", "DT", "DN"), _BASE + "C1' N1")
TYPES = {
    **dict.fromkeys(("A", "G", "C", "U", "N"), "RNA linking"),
    **dict.fromkeys(("DA", "DG", "DC", "DT", "DN"), "DNA linking"),
    "NAG": "D-saccharide, beta linking",
    "ZN": "non-polymer",
    "SO4": "non-polymer",
    "HOH": "non-polymer",
}
ATOM_COLUMNS = (
    "group_PDB",
    "id",
    "type_symbol",
    "label_atom_id",
    "label_alt_id",
    "label_comp_id",
    "label_asym_id",
    "label_entity_id",
    "label_seq_id",
    "pdbx_PDB_ins_code",
    "Cartn_x",
    "Cartn_y",
    "Cartn_z",
    "occupancy",
    "B_iso_or_equiv",
    "auth_seq_id",
    "auth_comp_id",
    "auth_asym_id",
    "auth_atom_id",
    "pdbx_PDB_model_num",
)
END_COLUMNS = (
    "label_asym_id",
    "label_comp_id",
    "label_seq_id",
    "label_atom_id",
    "auth_seq_id",
    "auth_asym_id",
    "auth_comp_id",
    "symmetry",
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A residue, or one alternative of it."""

    chain: str
    author_chain: str = ""  # "": the same
    name: str
    number: int
    insertion: str = "?"
    sequence: int | None = None  # None: in no polymer
    altloc: str = "."
    occupancy: float = 1.0
    atoms: tuple[str, ...] = ()  # (): those of `ATOMS`

    @property
    def atom_names(self) -> list[str]:
        return list(self.atoms) or ATOMS[self.name].split()


@dataclass(frozen=True, kw_only=True)
class Bond:
    """A row of struct_conn between atoms of two parts."""

    first: tuple[Part, str]
    second: tuple[Part, str]
    kind: str = "covale"
    length: float = 1.4  # Å: the second atom is put there
    symmetry: str = "1_555"


def polymer(chain: str, names: str, *, first: int = 1, sequence: int = 1) -> list[Part]:
    """Residues of a polymer, numbered on."""
    return [
        Part(chain=chain, name=name, number=first + step, sequence=sequence + step)
        for step, name in enumerate(names.split())
    ]


def write_cif(path: Path, parts: Sequence[Part], bonds: Sequence[Bond] = ()) -> Path:
    """The file; atoms lie 3 Å apart on a line, bonded ones as their bond says."""
    places: dict[tuple[Part, str], tuple[float, float, float]] = {}
    for part in parts:
        for name in part.atom_names:
            places[part, name] = (3.0 * len(places), len(places) % 7 * 1.0, 0.0)
    for bond in bonds:
        x, y, z = places[bond.first]
        places[bond.second] = (x, y, z + bond.length)
    lines = ["data_made", "_exptl.method 'X-RAY DIFFRACTION'"]
    lines += ["loop_", "_chem_comp.id", "_chem_comp.type"]
    for name in dict.fromkeys(part.name for part in parts):
        lines.append(f"{name} '{TYPES.get(name, 'L-peptide linking')}'")
    lines += ["loop_", *(f"_atom_site.{column}" for column in ATOM_COLUMNS)]
    for number, ((part, name), (x, y, z)) in enumerate(places.items(), start=1):
        sequence = "." if part.sequence is None else part.sequence
        group = "HETATM" if part.sequence is None else "ATOM"
        element = part.name if part.name == "ZN" else name[0]
        quoted = f'"{name}"'
        lines.append(
            f"{group} {number} {element} {quoted} {part.altloc} {part.name} {part.chain} 1 "
            f"{sequence} {part.insertion} {x:.3f} {y:.3f} {z:.3f} {part.occupancy} 20.0 "
            f"{part.number} {part.name} {part.author_chain or part.chain} {quoted} 1"
        )
    if bonds:
        lines += ["loop_", "_struct_conn.id", "_struct_conn.conn_type_id"]
        for end in (1, 2):
            lines += [f"_struct_conn.ptnr{end}_{column}" for column in END_COLUMNS]
            lines.append(f"_struct_conn.pdbx_ptnr{end}_PDB_ins_code")
            lines.append(f"_struct_conn.pdbx_ptnr{end}_label_alt_id")
    for number, bond in enumerate(bonds, start=1):
        row = [f"b{number}", bond.kind]
        for (part, name), symmetry in zip(
            (bond.first, bond.second), ("1_555", bond.symmetry), strict=True
        ):
            sequence = "?" if part.sequence is None else str(part.sequence)
            row += [part.chain, part.name, sequence, f'"{name}"', str(part.number)]
            row += [part.author_chain or part.chain, part.name, symmetry]
            row.append(part.insertion)
            row.append("?" if part.altloc == "." else part.altloc)
        lines.append(" ".join(row))
    path.write_text("\n".join([*lines, ""]))
    return path
