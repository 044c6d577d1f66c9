"""docs/encoders.md says of every declared encoder what the declaration says."""

from pathlib import Path

from thinsection.encode import declared_encoders

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
