"""The draft of the paper: the journal's sections, references that exist, counts that are true."""

import re
from pathlib import Path

import pytest

from thinsection.citation.bibtex import known_references, parse_bibtex
from thinsection.encode.registry import declared_encoders
from thinsection.pool.encoder import SLIDE_ENCODERS

ROOT = Path(__file__).parent.parent
PAPER = (ROOT / "paper" / "paper.md").read_text()
HEADER, BODY = PAPER.split("---\n", 2)[1:]
LISTED = parse_bibtex((ROOT / "paper" / "paper.bib").read_text())
SECTIONS = (
    "Summary",
    "Statement of need",
    "State of the field",
    "Software design",
    "Research impact statement",
    "AI usage disclosure",
    "Acknowledgements",
    "References",
)


def test_the_header_has_what_the_journal_needs() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    header = yaml.safe_load(HEADER)
    assert {"title", "tags", "authors", "affiliations", "date", "bibliography"} <= set(
        header
    )
    assert header["bibliography"] == "paper.bib"
    indices = {one["index"] for one in header["affiliations"]}
    assert {one["affiliation"] for one in header["authors"]} == indices
    assert [one["name"] for one in header["authors"]] == ["The Thinsection developers"]


def test_it_has_the_sections_in_order_and_a_length_that_is_read() -> None:
    heads = re.findall(r"^# (.+)$", BODY, re.MULTILINE)
    assert [one for one in heads if one in SECTIONS] == list(SECTIONS)
    prose = re.sub(r"<!--.*?-->|^\|.*$", "", BODY, flags=re.DOTALL | re.MULTILINE)
    assert 700 <= len(prose.split()) <= 1750


def test_what_only_a_person_can_write_is_left_to_a_person() -> None:
    for name in (
        "Research impact statement",
        "AI usage disclosure",
        "Acknowledgements",
    ):
        section = BODY.split(f"# {name}\n")[1].split("\n# ")[0]
        assert section.strip().startswith("To be written by the authors")


def test_each_citation_has_an_entry_and_each_entry_is_cited() -> None:
    cited = re.findall(r"@([\w-]+)(?=[;\]])", BODY)
    assert len(cited) > 20
    assert set(cited) == set(LISTED)


def test_an_entry_that_the_package_has_too_is_the_same() -> None:
    known = known_references()
    both = set(LISTED) & set(known)
    assert len(both) > 10
    for key in both:
        assert LISTED[key] == known[key]
    for entry in LISTED.values():
        assert entry.identifier or entry.fields["howpublished"]


def test_the_counts_of_encoders_are_those_of_the_package() -> None:
    words = " ".join(BODY.split())
    encoders = len(declared_encoders())
    poolers = len(SLIDE_ENCODERS.names())
    assert f"{encoders} declared tile encoders and {poolers} slide encoders" in words
