"""mmCIF files become AlphaFold 3's tokens, and their frames a table."""

import gzip
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from tests.frames.structures import real_structures, write_small

from thinsection.errors import InvalidInputError, StructureError
from thinsection.frames import (
    frame_atoms,
    frame_table,
    read_structure,
    write_frames,
)
from thinsection.frames.reference import distances_between
from thinsection.frames.structure import ATOM, DNA, PROTEIN, joined
from thinsection.frames.token_frames import FrameOptions

REAL = real_structures()
needs_real = pytest.mark.skipif(
    not REAL,
    reason="needs the structures in openfold3 (pip install --no-deps openfold3==0.5.0)",
)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path / "small.cif")


def test_residues_and_nucleotides_are_one_token_modified_ones_and_ligands_one_per_atom(
    small,
) -> None:
    structure = read_structure(small)
    rows = zip(structure.token_kind, structure.token_residue_name, strict=True)
    counted: dict[tuple[int, str], int] = {}
    for kind, name in rows:
        key = (int(kind), structure.names[name])
        counted[key] = counted.get(key, 0) + 1
    assert counted == {
        (PROTEIN, "GLY"): 1,
        (ATOM, "SEP"): 5,  # the likeliest CB once, no hydrogen
        (PROTEIN, "ALA"): 1,
        (PROTEIN, "MSE"): 1,
        (DNA, "DA"): 1,
        (DNA, "DC"): 1,
        (ATOM, "LIG"): 4,
        (ATOM, "ZN"): 1,
    }
    assert structure.chains == ("A", "B", "C", "D")
    cb = structure.names.index("CB")
    assert structure.atom_positions[structure.atom_name == cb].tolist() == [
        pytest.approx([3.1, -0.8, 1.2])
    ]


def test_the_table_names_each_frames_atoms_and_says_which_are_valid(
    small: Path,
) -> None:
    table, summary = frame_table(read_structure(small), "small")
    rows = table.to_pylist()
    by_residue = {(r["residue_name"], r["atom_b"]): r for r in rows}
    glycine = by_residue["GLY", "CA"]
    assert (glycine["atom_a"], glycine["atom_c"], glycine["valid"]) == ("N", "C", True)
    assert (
        not by_residue["ALA", "CA"]["valid"]
        and by_residue["ALA", "CA"]["angle"] is None
    )
    assert by_residue["MSE", "CA"]["valid"]
    base = by_residue["DA", "C1'"]
    assert (base["atom_a"], base["atom_c"]) == ("C3'", "C4'")
    carbon = by_residue["LIG", "C1"]
    assert (carbon["atom_a"], carbon["atom_c"], carbon["valid"]) == ("O1", "C2", True)
    assert carbon["angle"] == pytest.approx(
        np.degrees(np.arccos(-0.7 / np.hypot(0.7, 1.3))), 1e-4
    )
    zinc = by_residue["ZN", "ZN"]
    assert not zinc["valid"] and zinc["angle"] is None
    assert summary.valid_frames == sum(r["valid"] for r in rows)
    assert (summary.too_few_atoms, summary.missing_atoms) == (1, 1)
    unframed = summary.too_few_atoms + summary.missing_atoms + summary.near_a_line
    assert summary.tokens == summary.valid_frames + unframed == len(rows)


def test_an_assembly_repeats_the_chains_and_their_frames(small: Path) -> None:
    once, _ = frame_table(read_structure(small), "small")
    twice = read_structure(small, assembly="1")
    table, _ = frame_table(twice, "small")
    assert twice.chains == ("A", "B", "C", "D", "A-2", "B-2", "C-2", "D-2")
    assert table.num_rows == 2 * once.num_rows
    for column in ("atom_a", "atom_b", "atom_c", "valid", "residue"):
        assert table[column].to_pylist() == 2 * once[column].to_pylist()
    with pytest.raises(
        StructureError, match=r"assembly must be one of 1 in .* got '7'"
    ):
        read_structure(small, assembly="7")


def test_symmetry_copies_are_placed_exactly_and_search_does_not_cross_chains(
    small: Path,
) -> None:
    single = read_structure(small)
    quarter = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    moved = single.placed(quarter, [0, 0, 0.5], "-2")
    x, y, z = single.atom_positions.T
    np.testing.assert_allclose(moved.atom_positions.T, [-y, x, z + 0.5])
    frames, _ = frame_table(joined([single, moved]), "both")  # they interpenetrate
    alone, _ = frame_table(single, "one")
    assert frames["atom_a"].to_pylist() == 2 * alone["atom_a"].to_pylist()


def test_tables_are_written_as_parquet_and_csv_alike_from_plain_and_packed_files(
    small: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed.cif.gz"
    packed.write_bytes(gzip.compress(small.read_bytes()))
    paths = [small, packed]
    summaries = write_frames(paths, tmp_path / "f.parquet")
    write_frames(paths, tmp_path / "f.csv")
    columns = pyarrow.parquet.read_table(tmp_path / "f.parquet").to_pydict()
    text = pyarrow.csv.read_csv(tmp_path / "f.csv").to_pydict()
    assert [s.structure for s in summaries] == ["small", "packed"]
    assert columns["structure"] == ["small"] * 15 + ["packed"] * 15
    for name in ("structure", "chain", "atom_a", "valid", "index_c"):
        assert text[name] == columns[name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "structure must contain atoms"),
        (b"HEADER    NOT A CIF\n", "structure must be mmCIF, got"),
        (b"\x89PNG\r\n", "structure must be mmCIF, got"),
        (b"data_x\n_cell.length_a 3\n", "structure must contain atoms"),
    ],
)
def test_files_that_are_no_structure_are_named(
    tmp_path: Path, content: bytes, message
) -> None:
    path = tmp_path / "odd.cif"
    path.write_bytes(content)
    with pytest.raises(StructureError, match=message) as caught:
        write_frames([path], tmp_path / "f.csv")
    assert str(path) in str(caught.value)


def test_a_missing_file_a_broken_gzip_and_only_water_are_named(tmp_path: Path) -> None:
    with pytest.raises(StructureError, match="structure must be an existing file"):
        read_structure(tmp_path / "none.cif")
    (tmp_path / "x.cif.gz").write_bytes(b"no gzip")
    with pytest.raises(StructureError, match="structure must be mmCIF"):
        read_structure(tmp_path / "x.cif.gz")
    wet = write_small(tmp_path / "w.cif").read_text().splitlines()
    lines = [w for w in wet if not w.startswith(("ATOM", "HETATM")) or " HOH " in w]
    (tmp_path / "w.cif").write_text("\n".join(lines) + "\n")
    with pytest.raises(StructureError, match="structure must contain more than water"):
        read_structure(tmp_path / "w.cif")


def rows_of(path: Path) -> tuple[list[str], list[str], list[str]]:
    """Lines before the atoms of an mmCIF file, its atoms, and the lines after them."""
    lines = path.read_text().splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if line.startswith(("ATOM", "HETATM"))]
    return lines[: at[0]], lines[at[0] : at[-1] + 1], lines[at[-1] + 1 :]


def test_of_several_data_blocks_the_first_with_atoms_counts_and_the_others_are_named(
    small: Path, tmp_path: Path
) -> None:
    alone = read_structure(small)
    assert alone.notes == ()
    text = small.read_text()
    several = tmp_path / "several.cif"
    second = text.replace("data_small", "data_copy").replace(" GLY ", " ALA ")
    several.write_text("data_cell\n_cell.length_a 3\n" + text + second)
    found = read_structure(several)
    (note,) = found.notes
    assert note == "data blocks with atoms after 'small' are ignored: copy"
    np.testing.assert_array_equal(found.atom_positions, alone.atom_positions)
    (summary,) = write_frames([several], tmp_path / "f.csv")
    assert summary.notes == note


def test_repeated_atoms_count_once_and_are_named(small: Path, tmp_path: Path) -> None:
    """Chain A, nucleotide B of another author's chain, then both again."""
    alone = read_structure(small)
    before, atoms, after = rows_of(small)
    in_b = [
        atom.replace(" A 1\n", " B 1\n") if " DA " in atom else atom for atom in atoms
    ]
    path = tmp_path / "twice.cif"
    path.write_text("".join([*before, *in_b, *in_b, *after]))
    found = read_structure(path)
    np.testing.assert_array_equal(found.atom_positions, alone.atom_positions)
    np.testing.assert_array_equal(found.token_kind, alone.token_kind)
    heavy = sum(" HOH " not in atom and " H H " not in atom for atom in in_b)
    assert found.notes == (
        f"{heavy} repeated atoms are ignored, first N of GLY 1 in chain A",
    )
    # the other half of a residue, after another chain, is no repetition
    split = [*in_b[:2], *in_b[4:], *in_b[2:4]]
    path.write_text("".join([*before, *split, *after]))
    found = read_structure(path)
    assert found.notes == ()
    np.testing.assert_array_equal(found.atom_positions, alone.atom_positions)


def test_options_are_checked(small: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"out must end in \.parquet or \.csv"):
        write_frames([small], tmp_path / "f.txt")
    with pytest.raises(
        InvalidInputError, match="structure_paths must name at least one file"
    ):
        write_frames([], tmp_path / "f.csv")
    with pytest.raises(
        InvalidInputError, match=r"angle_threshold must be in \[0, 90\], got 120"
    ):
        write_frames([small], tmp_path / "f.csv", angle_threshold=120)


@needs_real
@pytest.mark.parametrize("path", REAL, ids=lambda p: p.stem)
def test_real_structures_have_sound_frames(path: Path) -> None:
    structure = read_structure(path)
    table, summary = frame_table(structure, path.stem)
    assert summary.valid_frames > 0.8 * (summary.tokens - summary.atom_tokens)
    valid = table.filter(table["valid"])
    angles = valid.filter(pc.equal(valid["kind"].cast("string"), "protein"))[
        "angle"
    ].to_numpy()
    assert abs(np.median(angles) - 111) < 4  # N-CA-C of a protein: 111 degrees
    atoms = valid.filter(pc.equal(valid["kind"].cast("string"), "atom"))
    for letter in "ac":
        a, b = (
            structure.atom_positions[atoms[f"index_{c}"].to_numpy()]
            for c in (letter, "b")
        )
        assert (np.linalg.norm(a - b, axis=1) < 3.5).all()  # bonded or one further


@needs_real
def test_a_real_dna_complex_has_frames_on_its_sugars_and_its_buffer_molecule() -> None:
    path = next(p for p in REAL if p.stem == "2q2k")
    table, _ = frame_table(read_structure(path, assembly="1"), "2q2k")
    rows = [r for r in table.to_pylist() if r["kind"] == "dna"]
    assert {(r["atom_a"], r["atom_b"], r["atom_c"]) for r in rows} == {
        ("C3'", "C1'", "C4'")
    }
    assert all(r["valid"] for r in rows)
    assert {r["residue_name"] for r in table.to_pylist() if r["kind"] == "atom"} == {
        "5IU",  # 5-iodo-uridine, a modified nucleotide
        "EPE",
    }


@needs_real
@pytest.mark.parametrize("path", REAL, ids=lambda p: p.stem)
def test_both_searches_agree_on_real_structures_where_no_distances_are_equal(
    path: Path,
) -> None:
    structure = read_structure(path)
    batch, x, mask = structure.tensors()
    by_chain = frame_atoms(batch, x, mask)
    by_rows = frame_atoms(batch, x, mask, options=FrameOptions(impl="rows"))
    assert torch.equal(by_chain.valid, by_rows.valid)
    valid = by_chain.valid.bool()
    for ours, rows in zip(
        by_chain.indices[:, valid], by_rows.indices[:, valid], strict=True
    ):
        other = ours != rows
        centre = x[by_chain.indices[1, valid][other]]
        lengths = [
            distances_between(centre[:, None], x[i[other]][:, None], eps=1e-8)
            for i in (ours, rows)
        ]
        assert torch.equal(
            *lengths
        )  # deposited at 0.001 Å, some distances are equal in float32
