"""The list of references is whole: each method has an entry; each entry parses and is used."""

import re
from typing import Any, get_args

import pytest

from thinsection.citation.bibtex import known_references, parse_bibtex
from thinsection.citation.cite import Citation
from thinsection.citation.methods import Account, known_methods
from thinsection.encode.registry import declared_encoders
from thinsection.errors import StoreError
from thinsection.evaluation import metrics, target
from thinsection.evaluation.parts import FoldUnit
from thinsection.exchange.peer_sources import SOURCES
from thinsection.pool.encoder import SLIDE_ENCODERS
from thinsection.predict.heads.config import HEADS
from thinsection.probe.protocol import PROTOCOLS
from thinsection.probe.registry import PROBES
from thinsection.qc.pipeline import CHECKS
from thinsection.segment.spec import SEGMENTERS
from thinsection.slide.readers import READERS
from thinsection.tiles.transforms import STANDARDS

REFERENCES = known_references()
DOI = re.compile(r"10\.\d{4,9}/\S+")
ARXIV = re.compile(r"\d{4}\.\d{5}")
TWO = """% a comment

@article{one2001two,
  author = {Abel, Anna and Berg, Bo and others},
  title = {On {DNA} of two--headed slides},
  journal = {Journal},
  volume = {3},
  pages = {1--2},
  year = {2001},
  doi = {10.1000/x_1},
}

@misc{lab,
  author = {{The Lab}},
  title = {A card},
  url = {https://example.org/card},
}
"""


@pytest.mark.parametrize(
    ("kind", "declared"),
    [
        ("reader", READERS.names()),
        ("tile_encoder", tuple(declared_encoders())),
        ("slide_encoder", SLIDE_ENCODERS.names()),
        ("segmenter", SEGMENTERS.names()),
        ("stain", (*STANDARDS, "measures")),
        ("qc_check", CHECKS.names()),
        ("head", HEADS.names()),
        ("target", get_args(target.Kind)),
        ("folds", get_args(FoldUnit)),
        ("interval", (*get_args(metrics.Kind), "auprc", "macro_f1")),
        ("probe", PROBES.names()),
        ("protocol", tuple(PROTOCOLS)),
        ("tool", tuple(SOURCES)),
    ],
)
def test_every_declared_method_has_a_line_and_no_line_is_left_over(
    kind: str, declared: tuple[str, ...]
) -> None:
    assert set(known_methods()[kind]) == set(declared)


def test_every_encoder_and_segmenter_of_others_has_a_reference() -> None:
    for kind in ("tile_encoder", "segmenter"):
        assert all(known_methods()[kind].values())
    without = {
        name for name, keys in known_methods()["slide_encoder"].items() if not keys
    }
    assert without == {"mean", "max"}


def test_every_key_has_an_entry_and_every_entry_is_used() -> None:
    used = {
        key
        for names in known_methods().values()
        for keys in names.values()
        for key in keys
    }
    assert used == set(REFERENCES)


@pytest.mark.parametrize("key", REFERENCES)
def test_an_entry_has_what_a_reader_needs_to_find_it(key: str) -> None:
    entry = REFERENCES[key]
    fields = entry.fields
    assert entry.kind in ("article", "inproceedings", "misc")
    assert fields["author"] and fields["title"]
    assert entry.identifier or fields["howpublished"]
    if entry.kind != "misc":
        assert re.fullmatch(r"(19|20)\d\d", fields["year"])
        assert fields.get("journal") or fields.get("booktitle")
    if "doi" in fields:
        assert DOI.fullmatch(fields["doi"])
    assert ("eprint" in fields) == (fields.get("archiveprefix") == "arXiv")
    if "eprint" in fields:
        assert ARXIV.fullmatch(fields["eprint"])
    for value in fields.values():
        assert value.count("{") == value.count("}")


def test_no_identifier_stands_in_two_entries() -> None:
    for name in ("doi", "eprint", "title"):
        values = [one.fields[name] for one in REFERENCES.values() if name in one.fields]
        assert len(set(values)) == len(values)


def test_identifiers_in_the_declarations_of_encoders_are_those_of_their_entries() -> (
    None
):
    compared = 0
    specs: dict[str, Any] = dict(declared_encoders())
    for name, spec in specs.items():
        entries = [
            REFERENCES[key].fields for key in known_methods()["tile_encoder"][name]
        ]
        for pattern, field in ((DOI, "doi"), (ARXIV, "eprint")):
            for found in pattern.findall(spec.source.replace(";", " ")):
                compared += 1
                assert found in {fields.get(field) for fields in entries}, name
    assert compared > 20


def test_two_entries_are_read_and_written_as_they_stand() -> None:
    read = parse_bibtex(TWO)
    article, card = read.values()
    assert (article.short, card.short) == ("Abel et al. 2001", "The Lab")
    assert article.text == (
        "Abel, Berg, et al. On DNA of two-headed slides. Journal 3, 1-2 (2001). doi:10.1000/x_1"
    )
    assert card.text == "The Lab. A card. https://example.org/card"
    assert parse_bibtex("\n\n".join(one.bibtex for one in read.values())) == read


@pytest.mark.parametrize(
    ("authors", "short"),
    [
        ("Abel, Anna", "Abel 2001"),
        ("Abel, Anna and Berg, Bo", "Abel and Berg 2001"),
        ("Abel, Anna and others", "Abel et al. 2001"),
        ("Abel, Anna and Berg, Bo and Carl, Cy", "Abel et al. 2001"),
    ],
)
def test_a_short_form_names_one_or_two_authors(authors: str, short: str) -> None:
    text = TWO.replace("Abel, Anna and Berg, Bo and others", authors)
    assert parse_bibtex(text)["one2001two"].short == short


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  volume = {3},", "  volume = 3,"),
        ("}\n\n@misc", "\n@misc"),
        ("@misc{lab,", "@misc{one2001two,"),
        ("  volume = {3},", "  journal = {3},"),
        ("https://example.org/card},\n}", "https://example.org/card},"),
        ("% a comment", "a comment"),
    ],
)
def test_an_entry_that_does_not_have_the_plain_form_is_an_error(
    before: str, after: str
) -> None:
    assert before in TWO
    with pytest.raises(StoreError, match=r"must (be BibTeX|end with)"):
        parse_bibtex(TWO.replace(before, after))


def test_a_line_end_in_a_users_words_does_not_leave_the_comment_of_bibtex() -> None:
    unknown = (
        "the slide 'a\n@misc{b}' was not read",
        "the slide 'a @misc{b}' was not read",
    )
    written = Citation(Account(unknown=unknown)).bibtex
    lines = [line for line in written.splitlines() if "@misc{b}" in line]
    assert lines == ["% not known: the slide 'a @misc{b}' was not read"]
