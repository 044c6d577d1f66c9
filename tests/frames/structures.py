"""Small mmCIF files of known content, and the real ones that an installed OpenFold3 carries."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import gemmi

AMINO = {
    "N": (0.0, 1.4, 0.0),
    "CA": (0.0, 0.0, 0.0),
    "C": (1.5, -0.3, 0.0),
    "O": (2.1, 0.7, 0.1),
}
SUGAR = [
    "P",
    "OP1",
    "OP2",
    "O5'",
    "C5'",
    "C4'",
    "O4'",
    "C3'",
    "O3'",
    "C2'",
    "C1'",
    "N9",
]


def residue(
    name: str, number: int, atoms: dict[str, tuple], entity: gemmi.EntityType, sub: str
):
    made = gemmi.Residue()
    made.name, made.seqid = name, gemmi.SeqId(number, " ")
    made.entity_type, made.subchain = entity, sub
    for atom_name, position in atoms.items():
        atom = gemmi.Atom()
        atom.name, _, altloc = atom_name.partition("|")
        atom.altloc = altloc[:1] or "\0"
        atom.occ = float(altloc[1:] or 1)
        atom.element = gemmi.Element(atom.name[0])
        atom.pos = gemmi.Position(*position)
        made.add_atom(atom)
    return made


def shifted(atoms: dict[str, tuple], dx: float) -> dict[str, tuple]:
    return {name: (x + dx, y, z) for name, (x, y, z) in atoms.items()}


def small_structure() -> gemmi.Structure:
    """A: GLY, SEP (modified), ALA without C, MSE; B: DA, DC; C: ligand of 4; D: ion; E: water."""
    polymer, ligand = gemmi.EntityType.Polymer, gemmi.EntityType.NonPolymer
    chain = gemmi.Chain("A")
    alternatives = {
        **AMINO,
        "CB|A0.3": (9.0, 9, 9),
        "CB|B0.7": (-0.7, -0.8, 1.2),
        "H": (1.0, 1, 1),
    }
    chain.add_residue(residue("GLY", 1, AMINO, polymer, "A"))
    chain.add_residue(residue("SEP", 2, shifted(alternatives, 3.8), polymer, "A"))
    partial = {k: v for k, v in AMINO.items() if k != "C"}
    chain.add_residue(residue("ALA", 3, shifted(partial, 7.6), polymer, "A"))
    chain.add_residue(residue("MSE", 4, shifted(AMINO, 11.4), polymer, "A"))
    nucleotide = {name: (i * 1.1, i % 3 * 1.0, 20.0) for i, name in enumerate(SUGAR)}
    chain.add_residue(residue("DA", 101, nucleotide, polymer, "B"))
    chain.add_residue(residue("DC", 102, shifted(nucleotide, 14.0), polymer, "B"))
    four = {
        "C1": (0.0, 0, 40),
        "O1": (1.2, 0, 40),
        "C2": (-0.7, 1.3, 40),
        "C3": (-2.2, 1.3, 40.4),
    }
    chain.add_residue(residue("LIG", 201, four, ligand, "C"))
    chain.add_residue(residue("ZN", 202, {"ZN": (0.0, 0, 60)}, ligand, "D"))
    water = gemmi.EntityType.Water
    chain.add_residue(residue("HOH", 301, {"O": (0.0, 0, 80)}, water, "E"))
    model = gemmi.Model(1)
    model.add_chain(chain)
    structure = gemmi.Structure()
    structure.name = "small"
    structure.add_model(model)
    for name, subchains, kind, polymer_type in (
        ("1", ["A"], polymer, gemmi.PolymerType.PeptideL),
        ("2", ["B"], polymer, gemmi.PolymerType.Dna),
        ("3", ["C"], ligand, gemmi.PolymerType.Unknown),
        ("4", ["D"], ligand, gemmi.PolymerType.Unknown),
        ("5", ["E"], water, gemmi.PolymerType.Unknown),
    ):
        entity = gemmi.Entity(name)
        entity.subchains, entity.entity_type, entity.polymer_type = (
            subchains,
            kind,
            polymer_type,
        )
        structure.entities.append(entity)
    structure.assemblies.append(_dimer())
    return structure


def _dimer() -> gemmi.Assembly:
    assembly, generator = gemmi.Assembly("1"), gemmi.Assembly.Gen()
    generator.subchains = ["A", "B", "C", "D"]
    for name, vector in (("1", (0, 0, 0)), ("2", (100, 0, 0))):
        operator = gemmi.Assembly.Operator()
        operator.name = name
        operator.transform = gemmi.Transform(gemmi.Mat33(), gemmi.Vec3(*vector))
        generator.operators.append(operator)
    assembly.generators.append(generator)
    return assembly


def write_small(path: Path) -> Path:
    small_structure().make_mmcif_document().write_file(str(path))
    return path


def real_structures() -> list[Path]:
    """mmCIF files of the PDB in the installed openfold3 wheel; none where it is absent."""
    try:
        listed = files("openfold3") or []
    except PackageNotFoundError:
        return []
    return sorted(Path(str(f.locate())) for f in listed if f.suffix == ".cif")
