"""Which slides a run takes."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.dicom_slides import DicomKind, write_dicom

from thinsection.errors import CohortError
from thinsection.files.trust import may_be_local
from thinsection.slide import ids as slide_ids
from thinsection.slide.cohort import give_slide_ids, load_cohort
from thinsection.slide.cohort_table import SlidesConfig, parse_mpp


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_folder_gives_its_slides_in_a_stable_order(tmp_path: Path) -> None:
    touch(
        tmp_path / "b.svs",
        tmp_path / "a.tiff",
        tmp_path / "notes.txt",
        tmp_path / "x" / "c.ndpi",
    )
    touch(tmp_path / ".hidden.svs")
    assert [e.slide_id for e in load_cohort([tmp_path])] == ["a", "b", "c"]


def test_of_a_dicom_folder_one_file_stands_for_the_slide(tmp_path: Path) -> None:
    touch(*[tmp_path / "case" / f"{i}.dcm" for i in range(3)])
    assert [e.slide_path for e in load_cohort([tmp_path])] == [
        str(tmp_path / "case" / "0.dcm")
    ]


def test_equal_names_from_two_folders_stay_apart(tmp_path: Path) -> None:
    touch(tmp_path / "p1" / "a.svs", tmp_path / "p2" / "a.svs")
    ids = [e.slide_id for e in load_cohort([tmp_path])]
    assert len(set(ids)) == 2
    assert all(name.startswith("a-") for name in ids)


def test_the_same_slide_given_twice_is_taken_once(tmp_path: Path) -> None:
    touch(tmp_path / "a.svs")
    assert len(load_cohort([tmp_path, tmp_path / "a.svs"])) == 1


def test_a_table_gives_ids_mpp_and_labels(tmp_path: Path) -> None:
    touch(tmp_path / "s" / "a.svs", tmp_path / "s" / "b.svs")
    (tmp_path / "c.csv").write_text(
        "slide_path,slide_id,slide_mpp,patient_id,label,split,extra\n"
        "s/a.svs,first,0.25x0.26,p1,BRCA,train,x\n"
        "s/b.svs,,,,,,\n"
    )
    first, second = load_cohort([tmp_path / "c.csv"], SlidesConfig(slide_mpp="0.5"))
    assert (first.slide_id, first.slide_mpp, first.label) == (
        "first",
        (0.25, 0.26),
        "BRCA",
    )
    assert (second.slide_id, second.slide_mpp, second.label) == ("b", (0.5, 0.5), None)
    assert Path(second.slide_path) == tmp_path / "s" / "b.svs"


def cohort(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(["slide_path,slide_id", *rows]) + "\n")
    return path


def test_an_odd_file_name_gets_a_safe_id_with_a_word_and_refuses_no_other(
    tmp_path: Path,
) -> None:
    odd = ["a<b.svs", "c|d.svs", "run.json.svs", os.fsdecode(b"e\xff.svs")]
    touch(tmp_path / "good.svs", *[tmp_path / name for name in odd])
    said: list[str] = []
    found = {
        e.slide_path: e.slide_id
        for e in load_cohort([tmp_path], on_message=said.append)
    }
    assert found.pop(str(tmp_path / "good.svs")) == "good"
    assert len(said) == len(set(found.values())) == 4
    assert found[str(tmp_path / "a<b.svs")].startswith("a_b-")
    assert any(
        "'a<b' is not a valid name for a folder on all systems; its slide_id is 'a_b-"
        in s
        for s in said
    )
    again = {e.slide_path: e.slide_id for e in load_cohort([tmp_path])}
    assert again == found | {str(tmp_path / "good.svs"): "good"}  # from run to run


def test_two_links_to_one_slide_are_taken_once_with_a_word(tmp_path: Path) -> None:
    touch(tmp_path / "real" / "a.svs", tmp_path / "in" / "z.svs")
    for name in ("x.svs", "y.svs"):
        (tmp_path / "in" / name).symlink_to(tmp_path / "real" / "a.svs")
    said: list[str] = []
    entries = load_cohort([tmp_path / "in"], on_message=said.append)
    assert [e.slide_id for e in entries] == ["x", "z"]
    assert said == [
        f"'{tmp_path}/in/y.svs' is the same file as '{tmp_path}/in/x.svs' and is used once"
    ]
    table = cohort(tmp_path / "c.csv", "in/y.svs,named")
    assert [e.slide_id for e in load_cohort([tmp_path / "in", table])] == ["named", "z"]


def test_equal_ids_of_a_table_are_refused_and_those_of_files_give_way(
    tmp_path: Path,
) -> None:
    touch(tmp_path / "p1" / "a.svs", tmp_path / "p2" / "a.svs", tmp_path / "b.svs")
    with pytest.raises(
        CohortError, match=r"to one slide of a cohort, got 'A' for .*b.svs' and"
    ):
        load_cohort([cohort(tmp_path / "c.csv", "p1/a.svs,a", "b.svs,A")])
    with pytest.raises(CohortError, match=r"have one slide_id, got 'a' and 'b'"):
        load_cohort([cohort(tmp_path / "c.csv", "p1/a.svs,a", "p1/a.svs,b")])
    given = cohort(tmp_path / "c.csv", "p1/a.svs,a")
    ids = [e.slide_id for e in load_cohort([given, tmp_path / "p2" / "a.svs"])]
    assert ids[0] == "a"
    assert ids[1].startswith("a-")


def test_a_nul_in_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CohortError, match="with a NUL character"):
        load_cohort(["a\0b.svs"])
    with pytest.raises(CohortError, match="NUL character in line 2"):
        load_cohort([cohort(tmp_path / "c.csv", "a\0b.svs,x")])


def test_urls_pass_through() -> None:
    (entry,) = load_cohort(["s3://bucket/cases/a.svs?versionId=1"])
    assert (entry.slide_id, entry.slide_path) == (
        "a",
        "s3://bucket/cases/a.svs?versionId=1",
    )


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CohortError, match=r"existing file, folder or URL, got 'none.svs'"
    ):
        load_cohort(["none.svs"])
    with pytest.raises(
        CohortError, match=r"at least one slide, got .*known suffixes: .bif"
    ):
        load_cohort([tmp_path])
    (tmp_path / "c.csv").write_text("path\na.svs\n")
    with pytest.raises(CohortError, match=r"column 'slide_path', got \['path'\]"):
        load_cohort([tmp_path / "c.csv"])
    (tmp_path / "c.csv").write_text("slide_path,slide_mpp\na.svs,fine\n")
    with pytest.raises(CohortError, match=r"'0.25x0.26', got 'fine' in line 2"):
        load_cohort([tmp_path / "c.csv"])
    (tmp_path / "c.csv").write_bytes(b"slide_path\n\x81\xfe\n")
    with pytest.raises(CohortError, match="neither UTF-8 nor Windows-1252"):
        load_cohort([tmp_path / "c.csv"])


@pytest.mark.parametrize(
    "name", ["../up", "a/b", ".hidden", "x" * 300, "nul\x01", "run.json", "a<b"]
)
def test_an_id_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "c.csv").write_text(f'slide_path,slide_id\n/data/a.svs,"{name}"\n')
    with pytest.raises(CohortError, match="slide_id must be usable"):
        load_cohort([tmp_path / "c.csv"])


@pytest.mark.parametrize(
    "text", ["0", "-1", "a", "1x2x3", "nan", "inf", "1e-300", "0.5x1e9"]
)
def test_an_mpp_must_be_positive_numbers(text: str) -> None:
    with pytest.raises(CohortError, match="slide_mpp must be"):
        parse_mpp(text, where="--slide-mpp")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("wsi,mpp\na.svs,0.25\n", ("a", (0.25, 0.25), None, None)),
        (
            "sample_id,image_path,spacing_at_level_0\nx,a.svs,0.5\n",
            ("x", (0.5, 0.5), None, None),
        ),
        ("case_id,slide_id,label\np1,a.svs,LUAD\n", ("a", None, "p1", "LUAD")),
        ("slide_id,process,status\na.svs,1,tbp\n", ("a", None, None, None)),
        ("Filename,PATIENT,LABEL\na.svs,p1,LUAD\n", ("a", None, "p1", "LUAD")),
        ("slide,extra\na.svs,7\n", ("a", None, None, None)),
    ],
)
def test_columns_of_other_tools_are_understood(
    tmp_path: Path, table: str, expected: tuple[object, ...]
) -> None:
    (tmp_path / "c.csv").write_text(table)
    (entry,) = load_cohort([tmp_path / "c.csv"])
    assert (entry.slide_id, entry.slide_mpp, entry.patient_id, entry.label) == expected
    assert entry.slide_path == str(tmp_path / "a.svs")


def test_further_columns_are_kept_and_known_ones_are_not_doubled(
    tmp_path: Path,
) -> None:
    (tmp_path / "c.csv").write_text("wsi,case_id,site,width\na.svs,p1,Basel,7\n")
    (entry,) = load_cohort([tmp_path / "c.csv"])
    assert entry.more == {"case_id": "p1", "site": "Basel"}


def test_a_hint_does_not_suggest_the_users_own_unknown_column(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("slidepath\na.svs\n")
    with pytest.raises(CohortError) as caught:
        load_cohort([tmp_path / "c.csv"])
    assert "did you mean" not in str(caught.value)
    assert "also known: wsi, image_path, filename, slide" in str(caught.value)


PATTERN = r"(?P<cohort>[^/]+)/(?P<case_id>TCGA-\w\w-\w{4}).*"


def test_what_a_path_says_becomes_columns(tmp_path: Path) -> None:
    for name in (
        "TCGA-LUAD/TCGA-05-4244-01Z.svs",
        "TCGA-LUSC/TCGA-18-3406-01Z.svs",
        "other.svs",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    said: list[str] = []
    found = load_cohort([tmp_path], SlidesConfig(name_pattern=PATTERN), said.append)
    assert [e.more for e in found] == [
        {"cohort": "TCGA-LUAD", "case_id": "TCGA-05-4244"},
        {"cohort": "TCGA-LUSC", "case_id": "TCGA-18-3406"},
        {},
    ]
    assert [e.patient_id for e in found] == ["TCGA-05-4244", "TCGA-18-3406", None]
    assert "name_pattern does not match" in said[0]
    assert len(said) == 1


def test_what_a_table_says_wins_over_the_path(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text(
        "wsi,case_id,cohort\nX/TCGA-05-4244-01Z.svs,p7,mine\n"
    )
    (entry,) = load_cohort([tmp_path / "c.csv"], SlidesConfig(name_pattern=PATTERN))
    assert (entry.patient_id, entry.more["cohort"]) == ("p7", "mine")


@pytest.mark.parametrize(
    "pattern", ["(", "no group", "(?P<slide_id>.)", "(?P<width>.)"]
)
def test_a_pattern_that_names_nothing_is_refused(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "a.svs").touch()
    with pytest.raises(CohortError, match="name_pattern must"):
        load_cohort([tmp_path], SlidesConfig(name_pattern=pattern))


def test_a_question_mark_is_part_of_a_files_name_and_ends_a_urls(
    tmp_path: Path,
) -> None:
    touch(tmp_path / "what?.svs", tmp_path / "what?a.svs")
    entries = load_cohort([tmp_path])
    assert [entry.slide_id.rpartition("-")[0] for entry in entries] == [
        "what_",
        "what_a",
    ]


def test_the_url_of_a_folder_gives_the_slides_below_it(bucket: Any) -> None:
    for name in ("a.svs", "P1/b.svs", "notes.txt", "x.zarr/zarr.json", "d/1.dcm"):
        bucket.pipe_file(f"slides/cohort/{name}", b"x")
    bucket.pipe_file("slides/cohort/d/2.dcm", b"x")
    wanted = ["P1/b.svs", "a.svs", "d/1.dcm", "x.zarr"]
    for url in ("s3://slides/cohort/", "s3://slides/cohort"):
        paths = [entry.slide_path for entry in load_cohort([url])]
        assert paths == [f"s3://slides/cohort/{name}" for name in wanted]
    assert [e.slide_id for e in load_cohort(["s3://slides/cohort/"])] == [
        "b",
        "a",
        "1",
        "x",
    ]
    with pytest.raises(CohortError, match="at least one slide, got 's3://slides/no/'"):
        load_cohort(["s3://slides/no/"])
    with pytest.raises(CohortError, match=r"local CSV.*c\.csv"):
        load_cohort(["s3://slides/c.csv"])


def test_more_names_of_one_hash_get_a_longer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slide_ids, "_HASH_DIGITS", (1, 64))
    files = {f"/p{number}/scan.svs": "scan" for number in range(40)}
    ids = slide_ids.assign_ids(files, {})
    assert len(set(ids.values())) == 40
    assert len(ids["/p0/scan.svs"]) == len("scan-1")


def test_two_resolutions_of_a_slide_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "c.csv"
    table.write_text("slide_path,mpp,spacing\na.svs,0.25,0.5\n")
    with pytest.raises(
        CohortError, match=r"got 0.25 and 0.5 in mpp, spacing in line 2"
    ):
        load_cohort([table])
    table.write_text("slide_path,mpp,spacing\na.svs,0.25,0.250\n")
    assert load_cohort([table])[0].slide_mpp == (0.25, 0.25)
    table.write_text("slide_path,mpp,MPP\na.svs,0.25,0.5\n")
    with pytest.raises(CohortError, match="by more than capitals, got 'mpp' and 'MPP'"):
        load_cohort([table])


def test_a_workbook_and_a_table_of_tabs_are_cohorts(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["read me"])
    sheet = book.create_sheet("slides")
    sheet.append(["slide_path", "patient_id"])
    sheet.append(["a.svs", 1007.0])
    book.save(tmp_path / "c.xlsx")
    (tmp_path / "c.tsv").write_text("slide_path\tpatient_id\na.svs\t1007\n")
    said: list[str] = []
    for source in ("c.xlsx", "c.xlsx#slides", "c.tsv"):
        (entry,) = load_cohort([tmp_path / source], on_message=said.append)
        assert entry.patient_id == "1007"
    assert said[0].startswith("c.xlsx: sheet 'slides' of 2 is read, not 'Sheet'")
    with pytest.raises(CohortError, match="existing file, folder or URL"):
        load_cohort([tmp_path / "none.xlsx"])


def dicom_file(path: Path, series: str) -> Path:
    """One level of a DICOM slide, of 4 frames."""
    pixels = np.zeros((96, 128, 3), np.uint8)
    (file,) = write_dicom(path, [[pixels]], DicomKind(), series=series)
    return file


def test_files_of_one_dicom_series_are_one_slide_also_where_each_is_named(
    tmp_path: Path,
) -> None:
    files = [dicom_file(tmp_path / f"{name}.dcm", "1.2.3.4") for name in "cab"]
    other = dicom_file(tmp_path / "z.dcm", "1.2.3.5")
    words: list[str] = []
    entries = load_cohort([*files, other], on_message=words.append)
    assert [Path(entry.slide_path).name for entry in entries] == ["c.dcm", "z.dcm"]
    assert len(words) == 1
    assert words[0].startswith("2 .dcm files left out of the list: another file")


def test_a_file_of_a_series_to_which_a_table_gives_an_id_stays_a_slide(
    tmp_path: Path,
) -> None:
    for name in "ab":
        dicom_file(tmp_path / f"{name}.dcm", "1.2.3.4")
    table = tmp_path / "c.csv"
    table.write_text("slide_path,slide_id\na.dcm,first\nb.dcm,second\n")
    assert [e.slide_id for e in load_cohort([table])] == ["first", "second"]


def test_a_folder_of_several_dicom_slides_is_named_with_their_number(
    tmp_path: Path,
) -> None:
    for number, name in enumerate("abc"):
        dicom_file(tmp_path / "glass" / f"{name}.dcm", f"1.2.3.{number // 2}")
    words: list[str] = []
    assert len(load_cohort([tmp_path], on_message=words.append)) == 2
    assert words == [
        "'glass': 3 .dcm files are 2 slides of 2 + 1 files, by their SeriesInstanceUID"
    ]


def test_the_image_of_a_table_wins_over_the_image_for_all(tmp_path: Path) -> None:
    touch(tmp_path / "a.tiff", tmp_path / "b.tiff", tmp_path / "c.tiff")
    table = tmp_path / "c.csv"
    table.write_text(
        "slide_path,image,slide_id\na.tiff,left,\nb.tiff,,\nc.tiff,,mine\n"
    )
    entries = load_cohort([table], SlidesConfig(image="right"))
    assert [entry.image for entry in entries] == ["left", "right", "right"]
    assert [entry.slide_id for entry in entries] == ["a-left", "b-right", "mine"]


def test_an_image_column_that_repeats_the_file_names_no_picture(tmp_path: Path) -> None:
    touch(*[tmp_path / f"{name}.tiff" for name in "abc"])
    table = tmp_path / "c.csv"
    table.write_text("slide_path,image\na.tiff,a.tiff\nb.tiff,b\nc.tiff,a\n")
    assert [entry.image for entry in load_cohort([table])] == [None, None, "a"]


def test_a_line_that_stands_twice_in_a_table_is_one_slide(tmp_path: Path) -> None:
    touch(tmp_path / "a.svs")
    table = tmp_path / "c.csv"
    table.write_text("slide_path,slide_id\na.svs,one\na.svs,one\n")
    words: list[str] = []
    (entry,) = load_cohort([table], on_message=words.append)
    assert entry.slide_id == "one"
    assert words == []


def test_one_slide_with_two_ids_is_refused(tmp_path: Path) -> None:
    touch(tmp_path / "a.svs")
    table = tmp_path / "c.csv"
    table.write_text("slide_path,slide_id\na.svs,one\na.svs,two\n")
    with pytest.raises(CohortError, match="one slide_id, got 'one' and 'two'"):
        load_cohort([table])


def test_the_id_of_a_table_wins_wherever_the_slide_is_named(tmp_path: Path) -> None:
    touch(tmp_path / "a.svs")
    table = tmp_path / "c.csv"
    table.write_text("slide_path,slide_id\na.svs,one\n")
    for slides in ([tmp_path / "a.svs", table], [table, tmp_path / "a.svs"]):
        (entry,) = load_cohort(slides)
        assert entry.slide_id == "one"


def test_names_that_differ_in_their_unicode_form_alone_are_told(tmp_path: Path) -> None:
    composed = "caf\u00e9.svs"
    decomposed = "cafe\u0301.svs"
    touch(tmp_path / composed, tmp_path / decomposed, tmp_path / "b.svs")
    words: list[str] = []
    assert len(load_cohort([tmp_path], on_message=words.append)) == 3
    assert len(words) == 1
    assert words[0].startswith(f"{composed!r} is the name of several files")
    assert ascii(decomposed) in words[0]


def test_a_table_names_no_address_of_this_machine_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINSECTION_LOCAL_HOSTS", "")
    table = tmp_path / "c.csv"
    table.write_text("slide_path\nhttp://localhost:1/a.svs\n")
    with pytest.raises(CohortError, match=r"must not name this machine.*line 2"):
        load_cohort([table])
    (entry,) = load_cohort([table], SlidesConfig(allow_local_urls=True))
    assert entry.slide_path == "http://localhost:1/a.svs"


def test_two_urls_of_a_table_that_differ_in_a_secret_alone_are_refused(
    tmp_path: Path,
) -> None:
    table = tmp_path / "c.csv"
    table.write_text(
        "slide_path\nhttps://h.org/a.svs?token=1111\nhttps://h.org/a.svs?token=2222\n"
    )
    with pytest.raises(CohortError, match=r"more than a password.*line 3.*line 2"):
        load_cohort([table])


def test_a_table_gives_every_column_of_a_slide(tmp_path: Path) -> None:
    touch(tmp_path / "a.svs", tmp_path / "b.svs")
    table = tmp_path / "c.csv"
    table.write_text(
        "slide_path,patient_id,label,split,site\na.svs,p1,yes,train,x\nb.svs,,,,\n"
    )
    first, second = load_cohort([table])
    assert (first.patient_id, first.label, first.split) == ("p1", "yes", "train")
    assert first.more == {"site": "x"}
    assert (second.patient_id, second.label, second.split) == (None, None, None)
    assert second.more == {}
    assert first.folder == str(tmp_path)
    assert not first.id_given


def test_a_line_without_a_path_is_named(tmp_path: Path) -> None:
    touch(tmp_path / "a.svs")
    table = tmp_path / "c.csv"
    table.write_text("slide_path,label\na.svs,x\n,y\n")
    with pytest.raises(CohortError, match=r"slide_path must not be empty.*line 3"):
        load_cohort([table])


def test_a_place_that_no_server_lists_is_a_slide_unless_it_is_a_folder() -> None:
    (entry,) = load_cohort(["nosuch://host/scan"])
    assert entry.slide_path == "nosuch://host/scan"
    for folder in ("scans", "scans.svs"):
        with pytest.raises(CohortError, match="folder by URL must be listed by its"):
            load_cohort([f"nosuch://host/{folder}/"])


def test_a_url_that_the_user_writes_may_be_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THINSECTION_LOCAL_HOSTS", "")
    (entry,) = load_cohort(["http://localhost:1/a.svs"])
    assert entry.slide_path == "http://localhost:1/a.svs"
    assert may_be_local("http://localhost:1/b.svs")
    assert os.environ["THINSECTION_LOCAL_HOSTS"] == "localhost"


def test_known_slides_keep_their_ids_and_give_way_to_a_table(tmp_path: Path) -> None:
    touch(tmp_path / "p1" / "a.svs", tmp_path / "p2" / "a.svs", tmp_path / "b.svs")
    (first,) = load_cohort([tmp_path / "p1" / "a.svs"])
    (second,) = load_cohort([tmp_path / "p2" / "a.svs"])
    known = {"a": slide_ids.SlideFile(first.file, "a")}
    by_file = {entry.file: entry for entry in (first, second)}
    ids = [entry.slide_id for entry in give_slide_ids(by_file, known)]
    assert ids[0] == "a"
    assert ids[1].startswith("a-")
    table = tmp_path / "c.csv"
    table.write_text("slide_path,slide_id\np2/a.svs,A\n")
    (given,) = load_cohort([table])
    by_file = {entry.file: entry for entry in (first, given)}
    ids = [entry.slide_id for entry in give_slide_ids(by_file, known)]
    assert ids[1] == "A"
    assert ids[0].startswith("a-")
