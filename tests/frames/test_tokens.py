"""Tokens of mmCIF files are those of OpenFold3 0.5.0's parser, bond filter and tokenizer.

`tests.support.openfold3_tokens` runs these files, and real entries, through OpenFold3 itself.
"""

from dataclasses import replace
from pathlib import Path

import gemmi
import pytest
from tests.frames.cif_text import ATOMS, Bond, Part, polymer, write_cif
from tests.frames.made_entries import MADE

from thinsection.frames import Structure, frame_table, read_structure
from thinsection.frames.structure import ATOM, DNA, KINDS, PROTEIN

Tokens = dict[tuple[str, str, str], int]  # (chain, number with code, name) -> tokens


def tokens_of(structure: Structure) -> Tokens:
    counted: Tokens = {}
    for token in range(structure.num_tokens):
        insertion = structure.names[structure.token_insertion[token]]
        key = (
            structure.chains[structure.token_chain[token]],
            f"{structure.token_residue[token]}{insertion}",
            structure.names[structure.token_residue_name[token]],
        )
        counted[key] = counted.get(key, 0) + 1
    return counted


def kinds_of(structure: Structure) -> dict[str, str]:
    """Kind of the tokens of each chain, several joined."""
    kinds: dict[str, set[str]] = {}
    for chain, kind in zip(structure.token_chain, structure.token_kind, strict=True):
        kinds.setdefault(structure.chains[chain], set()).add(KINDS[kind])
    return {chain: "+".join(sorted(each)) for chain, each in kinds.items()}


@pytest.mark.parametrize("name", MADE)
def test_the_tokens_of_a_made_entry_are_openfold3s(name: str, tmp_path: Path) -> None:
    entry = MADE[name]
    structure = read_structure(write_cif(tmp_path / "m.cif", entry.parts, entry.bonds))
    tokens = tokens_of(structure)
    assert tokens == entry.tokens
    places = {(part.chain, part.name): None for part in entry.parts}
    named = {(chain, name): None for chain, _, name in tokens}
    assert list(named) == [place for place in places if place in named]  # file order


@pytest.mark.parametrize("missing", ["auth_seq_id", "label_seq_id"])
def test_bonds_are_found_by_either_number_of_a_residue(
    missing: str, tmp_path: Path
) -> None:
    polymers = polymer("A", "ASN GLY ASN", first=11) + polymer("B", "ASN ASN")
    sugars = [Part(chain=chain, name="NAG", number=1) for chain in "CD"]
    bonds = [
        Bond(first=(polymers[2], "ND2"), second=(sugars[0], "C1")),
        Bond(first=(polymers[3], "ND2"), second=(sugars[1], "C1")),
    ]
    path = write_cif(tmp_path / "m.cif", [*polymers, *sugars], bonds)
    document = gemmi.cif.read(str(path))
    for end in (1, 2):
        column = document[0].find_loop(f"_struct_conn.ptnr{end}_{missing}")
        column.get_loop().remove_column(column.tag)
    document.write_file(str(path))
    tokens = tokens_of(read_structure(path))
    assert [count for (chain, _, _), count in tokens.items() if chain in "AB"] == [
        1,
        1,
        8,
        8,
        1,
    ]


def test_residue_types_and_kinds_are_those_of_the_chain(tmp_path: Path) -> None:
    parts = [
        *polymer("A", "UNK GLY UNK"),
        *polymer("B", "N A N G"),
        *polymer("C", "DN DA DN"),
        *polymer("D", "DA DG DC U"),  # one ribonucleotide in DNA
        Part(chain="E", name="ALA", number=1),
        Part(chain="F", name="NAG", number=1),
    ]
    structure = read_structure(write_cif(tmp_path / "m.cif", parts))
    assert kinds_of(structure) == {
        "A": "protein",
        "B": "rna",
        "C": "dna",
        "D": "dna",
        "E": "atom",
        "F": "atom",
    }
    types = dict(zip(structure.token_residue_name, structure.token_restype))
    by_name = {structure.names[name]: int(code) for name, code in types.items()}
    assert by_name == {
        "UNK": 20,
        "GLY": 7,
        "A": 21,
        "G": 22,
        "U": 24,
        "N": 25,
        "DA": 26,
        "DG": 27,
        "DC": 28,
        "DN": 30,
        "ALA": 0,
        "NAG": 20,
    }
    table, _ = frame_table(structure, "made")
    for row in table.to_pylist():
        if row["kind"] in ("rna", "dna"):
            assert (row["atom_a"], row["atom_b"]) == ("C3'", "C1'")


def test_of_equal_votes_the_first_kind_counts(tmp_path: Path) -> None:
    entry = MADE["equal_votes"]
    structure = read_structure(write_cif(tmp_path / "m.cif", entry.parts))
    assert kinds_of(structure) == {"A": "atom+protein", "B": "rna"}


def test_the_likeliest_alternative_counts_as_a_whole(tmp_path: Path) -> None:
    """The atoms of one letter, even where single atoms of another are likelier."""
    first, last = polymer("A", "GLY GLY", sequence=1)
    last = replace(last, number=3, sequence=3)
    side = {
        "A": Part(
            chain="A",
            name="SER",
            number=2,
            sequence=2,
            altloc="A",
            occupancy=0.4,
            atoms=("N", "CA", "C", "O", "CB"),
        ),
        "B": Part(
            chain="A", name="SER", number=2, sequence=2, altloc="B", occupancy=0.6
        ),
    }
    path = write_cif(tmp_path / "m.cif", [first, side["A"], side["B"], last])
    lines = path.read_text().splitlines()
    for index, line in enumerate(lines):
        if '"CB" A SER' in line:
            lines[index] = line.replace(" 0.4 ", " 0.9 ")
    path.write_text("\n".join([*lines, ""]))
    structure = read_structure(path)
    slots = slice(structure.token_num_atoms[0], structure.token_num_atoms[:2].sum())
    names = [structure.names[name] for name in structure.atom_name[slots]]
    assert names == ATOMS["SER"].split()
    # 4 atoms of GLY and 5 of alternative A come first, 3 Å apart
    wanted = [3.0 * number for number in range(9, 15)]
    assert structure.atom_positions[slots, 0].tolist() == wanted


def test_insertion_codes_tell_residues_of_one_number_apart(tmp_path: Path) -> None:
    parts = [
        *polymer("A", "GLY ALA SER"),
        *(
            Part(chain="A", name=name, number=3, insertion=code, sequence=number)
            for name, code, number in (("SER", "A", 4), ("ALA", "B", 5))
        ),
        *polymer("B", "DA DG"),
        Part(chain="B", name="DC", number=2, insertion="A", sequence=3),
    ]
    structure = read_structure(write_cif(tmp_path / "m.cif", parts))
    table, _ = frame_table(structure, "made")
    rows = [(r["chain"], r["residue"], r["insertion"]) for r in table.to_pylist()]
    assert rows == [
        ("A", 1, ""),
        ("A", 2, ""),
        ("A", 3, ""),
        ("A", 3, "A"),
        ("A", 3, "B"),
        ("B", 1, ""),
        ("B", 2, ""),
        ("B", 2, "A"),
    ]
    for letter in "abc":
        column = table[f"insertion_{letter}"].to_pylist()
        assert column == [insertion for _, _, insertion in rows]


def test_the_less_likely_residue_at_a_place_is_named(tmp_path: Path) -> None:
    entry = MADE["microheterogeneity"]
    structure = read_structure(write_cif(tmp_path / "m.cif", entry.parts))
    assert structure.notes == (
        "2 less likely residues are ignored where the file has several at one place, first "
        "SER 2 in chain A",
    )


def test_without_types_in_the_file_the_usual_residues_are_known(tmp_path: Path) -> None:
    parts = [*polymer("A", "GLY UNK"), *polymer("B", "A U"), *polymer("C", "DA DT")]
    parts.append(Part(chain="D", name="ZN", number=1))
    path = write_cif(tmp_path / "m.cif", parts)
    text = path.read_text()
    start, end = text.index("loop_\n_chem_comp"), text.index("loop_\n_atom_site")
    path.write_text(text[:start] + text[end:])
    kinds = kinds_of(read_structure(path))
    assert kinds == {"A": "protein", "B": "rna", "C": "dna", "D": "atom"}


def test_ends_of_polymers_lose_the_atom_that_other_residues_lack(
    tmp_path: Path,
) -> None:
    glycine = (*ATOMS["GLY"].split(), "OXT")
    base = ("OP3", *ATOMS["DA"].split())
    parts = [
        *polymer("A", "ALA"),
        Part(chain="A", name="GLY", number=2, sequence=2, atoms=glycine),
        Part(chain="B", name="DA", number=1, sequence=1, atoms=base),
        Part(chain="B", name="DA", number=2, sequence=2, atoms=base),
        Part(chain="C", name="GLY", number=1, atoms=glycine),
    ]
    structure = read_structure(write_cif(tmp_path / "m.cif", parts))
    names = [structure.names[name] for name in structure.atom_name]
    assert names.count("OXT") == 1  # of the ligand
    assert names.count("OP3") == 1  # of the second nucleotide
    kinds = [PROTEIN] * 2 + [DNA] * 2 + [ATOM] * 5
    assert structure.token_kind.tolist() == kinds
