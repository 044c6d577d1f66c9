"""A text means one known id, or is asked back: spellings of files, programs and people."""

import unicodedata

import pytest

from thinsection.errors import InvalidInputError
from thinsection.slide.ids import KnownIds, plain_id, without_suffix


@pytest.mark.parametrize(
    "text",
    [
        "s1",
        "s1.ome",
        " s1 ",
        "s1.svs",
        "s1.SVS",
        "s1.ome.tiff",
        "s1.ome.tif",
        "s1.ndpi",
        "s1.h5",
        "s1.zarr",
        "s1.ome.zarr/",
        "/data/x.svs/s1.svs",
        "a b/s1.svs",
        "C:\\scans\\s1.mrxs",
        "D:/scans/s1",
        "\\\\server\\share\\s1.tif",
        "../s1",
        "https://host/path/s1.svs",
        "s1\u00a0",
        "\ufeffs1",
        "s1\u200b",
    ],
)
def test_a_form_of_an_id_means_the_id(text: str) -> None:
    assert KnownIds(["s1", "s2"]).find(text) == "s1"


def test_excel_writes_a_number_as_a_number() -> None:
    ids = KnownIds(["1007", "P1.0"])
    assert ids.find("1007.0") == "1007"
    assert ids.find("P1.0") == "P1.0"
    assert KnownIds(["1007.0"]).find("1007") == "1007.0"
    assert ids.find("1007.5") is None


def test_unicode_forms_of_an_id_are_one() -> None:
    composed = unicodedata.normalize("NFC", "Münster é")
    decomposed = unicodedata.normalize("NFD", composed)
    assert composed != decomposed
    assert KnownIds([decomposed]).find(composed) == decomposed
    assert KnownIds([composed]).find(f"{decomposed}.svs") == composed


@pytest.mark.parametrize(
    ("text", "similar"),
    [
        ("pat-01", "PAT-01"),
        ("PAT_01", "PAT-01"),
        ("PAT 01", "PAT-01"),
        ("PAT-1.svs", "PAT-01"),
        ("x/PAT-01", "PAT-01"),
    ],
)
def test_what_may_be_another_id_is_asked_back(text: str, similar: str) -> None:
    ids = KnownIds(["PAT-01", "other"])
    assert ids.find(text) is None
    assert ids.words(text) == f"{text} (did you mean {similar}?)"


def test_a_number_of_a_block_is_no_path() -> None:
    ids = KnownIds(["345", "12/345"])
    assert ids.find("12/345") == "12/345"
    assert ids.find("99/345") is None
    assert plain_id("12/345 ") == "12/345"


def test_a_barcode_keeps_what_follows_its_dot() -> None:
    name = "TCGA-AA-0001-01Z-00-DX1.F6E9A5DF-B8D0-4A51"
    assert plain_id(f"{name}.svs") == name
    assert plain_id("P1.2") == "P1.2"
    assert without_suffix(".svs") == ".svs"


def test_a_text_that_may_mean_two_ids_is_refused_with_both() -> None:
    ids = KnownIds(["a.svs", "a.ndpi"])
    assert ids.find("a.svs") == "a.svs"
    with pytest.raises(InvalidInputError, match=r"got 'a', .* 'a.ndpi' or 'a.svs'"):
        ids.find("a")


def test_two_texts_that_mean_one_id_are_refused_by_name() -> None:
    ids = KnownIds(["a", "b"], "case_id")
    assert ids.match(["a.svs", "b", "b", "c"], "x.csv") == {"a.svs": "a", "b": "b"}
    with pytest.raises(
        InvalidInputError, match=r"case_id .* got 'a.svs' and 'a.ndpi' for 'a' in x.csv"
    ):
        ids.match(["a.svs", "a.ndpi"], "x.csv")


def test_the_id_of_an_ome_tiff_is_met_by_its_name_without_ome() -> None:
    for text in ("x.ome.tiff", "x", "dir/x.ome.tif"):
        assert KnownIds(["x.ome"]).find(text) == "x.ome"
