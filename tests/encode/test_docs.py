"""docs/encoders.md says of every declared encoder what the declaration says."""

from pathlib import Path

from thinsection.encode import declared_encoders
from thinsection.encode.fingerprint import fingerprint_paths

DOCS = Path(__file__).parents[2] / "docs" / "encoders.md"


def test_the_table_has_every_encoder_with_its_dimension_licence_and_repository() -> (
    None
):
    rows = [
        line
        for line in DOCS.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    cells = {
        row.split("|")[1].strip(" `"): [c.strip() for c in row.split("|")]
        for row in rows
    }
    for spec in declared_encoders().values():
        row = cells[spec.name]
        assert row[2:4] == [str(spec.dim), str(spec.tile_px)], spec.name
        assert spec.licence in row and (spec.repo or "in this package") in row, (
            spec.name
        )
        assert ("yes" in row) == spec.gated, spec.name
        commit = f"`{spec.revision}`" if spec.revision else "none known"
        assert (commit if spec.repo else "(the package's)") in row, spec.name


def test_the_table_of_comparisons_has_every_encoder_with_its_pin_and_fingerprint() -> (
    None
):
    text = (DOCS.parent / "validation" / "encoders.md").read_text(encoding="utf-8")
    table = text.split("| tile encoder |")[1].split("\n\n")[0]
    rows = {}
    for line in table.splitlines()[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name.strip("`")] = cells
    assert set(rows) == set(declared_encoders())
    for spec in declared_encoders().values():
        code, fp32, bf16, weights, fingerprint = rows[spec.name]
        assert weights == spec.pin + (", gated" if spec.gated else ""), spec.name
        has_fingerprint = fingerprint_paths(spec.name)[0].is_file()
        assert fingerprint == ("agrees" if has_fingerprint else "none"), spec.name
        # a share of the range: a figure that is right is below the tolerances
        if code == "not compared":
            assert fp32 == bf16 == "", spec.name
        else:
            assert float(fp32) < 5e-4, spec.name
            assert bf16 == "not measured" or float(bf16) < 0.1, spec.name
