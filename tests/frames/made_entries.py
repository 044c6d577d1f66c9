"""Made entries, one for each rule of OpenFold3's tokenizer, with the tokens that it gives them."""

from typing import NamedTuple

from tests.frames.cif_text import ATOMS, Bond, Part, polymer


class Made(NamedTuple):
    """A made entry."""

    parts: list[Part]
    bonds: list[Bond]
    tokens: dict[tuple[str, str, str], int]  # (chain, number with code, name) -> tokens


def _all_single(parts: list[Part]) -> dict[tuple[str, str, str], int]:
    """One token for each part."""
    return {(part.chain, str(part.number), part.name): 1 for part in parts}


def _atomised(*parts: Part) -> dict[tuple[str, str, str], int]:
    """A token for each atom of the parts."""
    return {
        (part.chain, str(part.number), part.name): len(part.atom_names)
        for part in parts
    }


def _glycans() -> Made:
    """Two asparagines with glycans, one of two sugars, and an asparagine without."""
    one = polymer("A", "GLY ASN ALA")
    two = polymer("B", "ASN ALA ASN")
    sugars = [
        Part(chain="C", name="NAG", number=1),
        Part(chain="C", name="NAG", number=2),
        Part(chain="D", name="NAG", number=1),
    ]
    bonds = [
        Bond(first=(one[1], "ND2"), second=(sugars[0], "C1")),
        Bond(first=(sugars[0], "O4"), second=(sugars[1], "C1"), kind="covale"),
        Bond(first=(two[0], "ND2"), second=(sugars[2], "C1"), kind="covale_sugar"),
    ]
    tokens = _all_single([*one, *two]) | _atomised(one[1], two[0], *sugars)
    return Made([*one, *two, *sugars], bonds, tokens)


def _bonds_that_do_not_count() -> Made:
    """Disulfides, of metals, too long, to a symmetry copy, and of another kind."""
    one = polymer("A", "CYS GLY CYS ALA SER ASN")
    two = polymer("B", "CYS GLY LYS")
    zinc = Part(chain="C", name="ZN", number=1)
    sugars = [Part(chain=chain, name="NAG", number=1) for chain in "DEF"]
    bonds = [
        Bond(first=(one[0], "SG"), second=(one[2], "SG"), kind="disulf", length=2.0),
        Bond(first=(one[2], "SG"), second=(two[0], "SG"), kind="disulf", length=2.0),
        Bond(first=(two[2], "NZ"), second=(zinc, "ZN"), kind="metalc", length=2.1),
        Bond(first=(one[4], "OG"), second=(sugars[0], "C1"), length=2.5),
        Bond(first=(one[5], "ND2"), second=(sugars[1], "C1"), symmetry="3_655"),
        Bond(first=(one[5], "OD1"), second=(sugars[2], "C1"), kind="hydrog"),
        Bond(first=(one[3], "N"), second=(one[3], "CB")),  # within a residue
    ]
    tokens = _all_single([*one, *two]) | _atomised(zinc, *sugars)
    return Made([*one, *two, zinc, *sugars], bonds, tokens)


def _bonds_between_neighbours() -> Made:
    """Peptide bonds of a modified residue are usual; a disulfide of neighbours is not."""
    one = polymer("A", "GLY SEP ALA")
    two = polymer("B", "CYS CYS ALA")
    three = polymer("C", "LYS GLY ASN")  # a bond between side chains that are not near
    bonds = [
        Bond(first=(one[0], "C"), second=(one[1], "N")),
        Bond(first=(one[1], "C"), second=(one[2], "N")),
        Bond(first=(two[0], "SG"), second=(two[1], "SG"), kind="disulf", length=2.0),
        Bond(first=(three[0], "NZ"), second=(three[2], "CG")),
    ]
    tokens = _all_single([*one, *two, *three]) | _atomised(one[1], two[0], two[1])
    return Made([*one, *two, *three], bonds, tokens)


def _nucleic_acids() -> Made:
    """A base with an adduct, and unknown nucleotides."""
    rna = polymer("A", "A N U G")
    dna = polymer("B", "DA DN DT DG")
    adducts = [Part(chain=chain, name="NAG", number=1) for chain in "CD"]
    bonds = [
        Bond(first=(rna[3], "N1"), second=(adducts[0], "C1"), kind="covale_base"),
        Bond(first=(dna[2], "N1"), second=(adducts[1], "C1")),
        Bond(first=(dna[0], "O3'"), second=(dna[1], "P"), kind="covale_phosphate"),
    ]
    tokens = _all_single([*rna, *dna]) | _atomised(rna[3], dna[2], *adducts)
    return Made([*rna, *dna, *adducts], bonds, tokens)


def _alternatives_of_a_bond() -> Made:
    """A bond of the less likely alternative does not count; one of the likelier does."""
    ends = polymer("A", "GLY GLY GLY GLY")
    first, _, _, last = ends
    less = Part(chain="A", name="ASN", number=2, sequence=2, altloc="A", occupancy=0.3)
    more = Part(chain="A", name="ASN", number=2, sequence=2, altloc="B", occupancy=0.7)
    likely = Part(
        chain="A", name="ASN", number=3, sequence=3, altloc="A", occupancy=0.8
    )
    other = Part(chain="A", name="ASN", number=3, sequence=3, altloc="B", occupancy=0.2)
    sugars = [Part(chain=chain, name="NAG", number=1) for chain in "BC"]
    bonds = [
        Bond(first=(less, "ND2"), second=(sugars[0], "C1")),
        Bond(first=(likely, "ND2"), second=(sugars[1], "C1")),
    ]
    tokens = _all_single([first, more, last]) | _atomised(likely, *sugars)
    parts = [first, less, more, likely, other, last, *sugars]
    return Made(parts, bonds, tokens)


def _microheterogeneity() -> Made:
    """Two places with two residues: the second likelier, and the first."""
    first, _, _, last = polymer("A", "GLY GLY GLY GLY")
    chosen = []
    parts = [first]
    for number, names, occupancies in (
        (2, ("SER", "LYS"), (0.3, 0.7)),
        (3, ("ALA", "CYS"), (0.8, 0.2)),
    ):
        pair = [
            Part(
                chain="A",
                name=name,
                number=number,
                sequence=number,
                altloc=letter,
                occupancy=occupancy,
            )
            for name, letter, occupancy in zip(names, "AB", occupancies, strict=True)
        ]
        parts += pair
        chosen.append(max(pair, key=lambda part: part.occupancy))
    parts.append(last)
    return Made(parts, [], _all_single([first, *chosen, last]))


def _insertion_codes() -> Made:
    """A bond to the inserted residue, not to the one whose number it shares."""
    parts = [
        *polymer("A", "GLY ASN"),
        Part(chain="A", name="ASN", number=2, insertion="A", sequence=3),
        Part(chain="A", name="GLY", number=2, insertion="B", sequence=4),
    ]
    sugar = Part(chain="B", name="NAG", number=1)
    bonds = [Bond(first=(parts[2], "ND2"), second=(sugar, "C1"))]
    tokens = {
        ("A", "1", "GLY"): 1,
        ("A", "2", "ASN"): 1,
        ("A", "2A", "ASN"): len(ATOMS["ASN"].split()),
        ("A", "2B", "GLY"): 1,
        ("B", "1", "NAG"): len(ATOMS["NAG"].split()),
    }
    return Made([*parts, sugar], bonds, tokens)


def _unknown_and_single_residues() -> Made:
    """UNK in chains is one token; a chain of one observed residue is no polymer."""
    one = polymer("A", "GLY UNK UNK ALA")
    two = polymer("B", "UNK SER")
    alone = [
        Part(chain="C", name="ALA", number=1, sequence=7),
        Part(chain="D", name="DA", number=1, sequence=2),
    ]
    ions = [Part(chain=chain, name="ZN", number=1) for chain in "EF"]
    buffers = [Part(chain=chain, name="SO4", number=1) for chain in "GH"]
    parts = [*one, *two, *alone, *ions, *buffers]
    tokens = _all_single(parts) | _atomised(*alone, *ions, *buffers)
    return Made(parts, [], tokens)


def _equal_alternatives() -> Made:
    """Equal sums of occupancies, the later letter first in the file."""
    first, _, last = polymer("A", "GLY GLY GLY")
    pair = [
        Part(
            chain="A",
            name=name,
            number=2,
            sequence=2,
            altloc=letter,
            occupancy=0.5,
        )
        for name, letter in (("ALA", "B"), ("UNK", "A"))
    ]
    return Made([first, *pair, last], [], _all_single([first, pair[1], last]))


def _equal_votes() -> Made:
    """As many atoms of a protein as of none, and of DNA as of RNA."""
    mixed = [
        Part(chain="A", name="SO4", number=1, sequence=1),
        Part(chain="A", name="ALA", number=2, sequence=2),
    ]
    hybrid = [
        Part(chain="B", name="DA", number=1, sequence=1),
        Part(chain="B", name="U", number=2, sequence=2, atoms=_atoms_of("DA")),
    ]
    tokens = _atomised(mixed[0]) | _all_single([mixed[1], *hybrid])
    return Made([*mixed, *hybrid], [], tokens)


def _atoms_of(name: str) -> tuple[str, ...]:
    return tuple(ATOMS[name].split())


def _ligands_after_all_polymers() -> Made:
    """Ligands belong to the authors' chains of the polymers, and come after both."""
    one = polymer("A", "GLY ALA")
    two = polymer("B", "ALA GLY")
    ligands = [
        Part(chain="C", author_chain="A", name="ZN", number=101),
        Part(chain="D", author_chain="B", name="SO4", number=101),
        Part(chain="E", author_chain="A", name="ZN", number=102),
    ]
    tokens = _all_single([*one, *two]) | _atomised(*ligands)
    return Made([*one, *two, *ligands], [], tokens)


MADE = {
    "glycans": _glycans(),
    "bonds_that_do_not_count": _bonds_that_do_not_count(),
    "bonds_between_neighbours": _bonds_between_neighbours(),
    "nucleic_acids": _nucleic_acids(),
    "alternatives_of_a_bond": _alternatives_of_a_bond(),
    "microheterogeneity": _microheterogeneity(),
    "equal_alternatives": _equal_alternatives(),
    "equal_votes": _equal_votes(),
    "insertion_codes": _insertion_codes(),
    "ligands_after_all_polymers": _ligands_after_all_polymers(),
    "unknown_and_single_residues": _unknown_and_single_residues(),
}
