"""docs/validation/encoders.md says of every published slide encoder what its class says."""

import json
from pathlib import Path

from thinsection.pool.encoder import SLIDE_ENCODERS
from thinsection.pool.published import PublishedSlideEncoder

ROOT = Path(__file__).parents[2]


def test_the_table_has_every_published_slide_encoder_with_its_difference_and_pin() -> (
    None
):
    text = (ROOT / "docs" / "validation" / "encoders.md").read_text(encoding="utf-8")
    table = text.split("| slide encoder |")[1].split("\n\n")[0]
    rows = {}
    for line in table.splitlines()[2:]:
        name, *cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        rows[name] = cells
    results = ROOT / "benchmarks" / "results" / "bench_slide_encoders.json"
    measured = {
        row["name"]: row
        for row in json.loads(results.read_text())["results"]["differences"]
    }
    published = {}
    for name in SLIDE_ENCODERS.names():
        target = SLIDE_ENCODERS.load(name)
        if isinstance(target, type) and issubclass(target, PublishedSlideEncoder):
            published[name] = target
    assert set(rows) == set(published)
    for name, encoder in published.items():
        commit, fp32, bf16, weights = rows[name]
        if encoder.repository is None:
            assert weights == "your file"
        else:
            assert weights.split(",")[0] == (
                "pinned" if encoder.revision else "unpinned"
            )
        assert (bf16 == "refused") == (encoder.large_layers is None), name
        if name in measured:
            row = measured[name]
            share = row["largest_difference"] / row["largest_value"]
            assert [commit, fp32] == [row["commit"][:7], f"{share:.1e}"]
