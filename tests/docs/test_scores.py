"""docs/probes.md shows the table that `thinsection probe scores` makes of the committed files."""

from pathlib import Path

from thinsection.probe.scores import read_scores, score_table

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_table_of_the_committed_scores() -> None:
    documents = read_scores([ROOT / "benchmarks" / "results"])
    assert len(documents) == 12
    page = (ROOT / "docs" / "probes.md").read_text(encoding="utf-8")
    assert score_table(documents) in page
    for document in documents:
        versions = document["versions"]
        assert len(versions["commit"]) == 40  # of a checkout without changes
        assert len(document["data"]["weights_sha256"]) == 64
