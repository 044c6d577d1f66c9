"""Tables as people bring them: each form is read as it is, or refused with line and remedy."""

import csv
import random
from io import BytesIO
from pathlib import Path

import openpyxl
import pytest

from thinsection.errors import CohortError, DatasetError
from thinsection.files.tables import Table, open_table

HEADER = ("slide_id", "label", "value")
ROWS = (("a", "é x", "1,5"), ("b", 'y "z"', "2,25"), ("c", "two\nlines", ""))


def as_text(delimiter: str, newline: str = "\n") -> str:
    lines = [delimiter.join(HEADER)]
    for row in ROWS:
        cells = ['"' + cell.replace('"', '""') + '"' for cell in row]
        lines.append(delimiter.join(cells))
    return newline.join(lines) + newline


def cells_of(table: Table) -> tuple[tuple[str, ...], ...]:
    assert table.columns == HEADER
    return tuple(tuple(row[name] for name in HEADER) for row in table.rows)


def table_of(folder: Path, content: str | bytes, *required: str) -> Table:
    path = folder / "table.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return open_table(path, required)


def workbook(path: Path, **sheets: list[list[object]]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for title, rows in sheets.items():
        sheet = book.create_sheet(title)
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


# forms that are read


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252"]
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_separator_encoding_and_line_ends_change_no_cell(
    tmp_path: Path, delimiter: str, encoding: str, newline: str
) -> None:
    content = as_text(delimiter, newline).encode(encoding)
    assert cells_of(table_of(tmp_path, content)) == ROWS


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    table = table_of(tmp_path, as_text(",") + "\n\nd,x,3\n")
    assert table.lines == (2, 3, 4, 8)
    assert table.place(3) == f"line 8 of {str(tmp_path / 'table.csv')!r}"


def test_excels_first_line_names_the_separator(tmp_path: Path) -> None:
    assert cells_of(table_of(tmp_path, "sep=;\n" + as_text(";"))) == ROWS


def test_decimal_commas_do_not_separate_columns(tmp_path: Path) -> None:
    table = table_of(tmp_path, "id;x\na;1,5\nb;2,5\nc;3,5\n")
    assert table.columns == ("id", "x")
    assert table.notes == ("cells are separated by semicolons",)


def test_windows_1252_is_said_with_an_example(tmp_path: Path) -> None:
    table = table_of(tmp_path, "id,town\na,Ulm\nb,Köln\n".encode("cp1252"))
    assert table.notes == ("the text is read as Windows-1252, such as 'Köln'",)


def test_outer_spaces_and_non_breaking_ones_are_no_part_of_a_cell(
    tmp_path: Path,
) -> None:
    table = table_of(tmp_path, "\ufeffslide_id , label\n a ,\u00a0x\u00a0\n")
    assert table.rows == ({"slide_id": "a", "label": "x"},)


def test_random_tables_are_read_as_pandas_reads_them(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    draw = random.Random(3)
    signs = 'ab1,;\t"\n .é'
    path = tmp_path / "table.csv"
    for _ in range(60):
        width = draw.randint(2, 5)
        rows = [[f"c{i}" for i in range(width)]]
        for _ in range(draw.randint(2, 6)):
            rows.append(
                ["".join(draw.choices(signs, k=draw.randint(1, 6))) for _ in rows[0]]
            )
        rows = [[f"x{cell}x" for cell in row] for row in rows]
        delimiter = draw.choice(",;\t")
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)
        frame = pandas.read_csv(path, sep=delimiter, dtype=str)
        table = open_table(path)
        assert table.columns == tuple(frame.columns)
        assert [tuple(row.values()) for row in table.rows] == [
            tuple(row) for row in frame.itertuples(index=False)
        ]


def test_parquet_is_read_by_its_content(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "table.csv"
    frame = pandas.DataFrame({"id": [7, 8], "x": [1.5, 2.0], "f": [True, None]})
    frame.to_parquet(path)
    assert open_table(path).rows == (
        {"id": "7", "x": "1.5", "f": "TRUE"},
        {"id": "8", "x": "2", "f": ""},
    )


# workbooks


def test_a_workbook_is_read_as_pandas_reads_it(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = [["id", "x"], [1007, 1.5], ["b", 2], [" c ", None]]
    path = workbook(tmp_path / "w.xlsx", Data=rows)
    table = open_table(path)
    assert [row["id"] for row in table.rows] == ["1007", "b", "c"]
    frame = pandas.read_excel(path)
    assert [row["x"] for row in table.rows] == ["1.5", "2", ""]
    assert frame["x"].tolist()[:2] == [1.5, 2.0]


def test_the_sheet_with_the_columns_is_read_and_said(tmp_path: Path) -> None:
    path = workbook(
        tmp_path / "w.xlsx",
        Notes=[["made by"], ["us"]],
        Data=[["id", "y"], ["a", 1]],
        Old=[["id", "y"], ["a", 0]],
    )
    table = open_table(path, ["y"])
    assert table.rows == ({"id": "a", "y": "1"},)
    assert table.notes == (
        "sheet 'Data' of 3 is read, not 'Notes', 'Old'; w.xlsx#Notes chooses another",
    )
    assert open_table(tmp_path / "w.xlsx#Old", ["y"]).rows[0]["y"] == "0"
    with pytest.raises(DatasetError, match="no sheet 'Dat'; did you mean 'Data'"):
        open_table(tmp_path / "w.xlsx#Dat", ["y"])


def test_a_formula_without_a_value_and_merged_cells_are_refused(tmp_path: Path) -> None:
    path = workbook(tmp_path / "w.xlsx", Data=[["id", "y"], ["a", "=1+1"], ["b", 2]])
    with pytest.raises(
        DatasetError, match="formula in row 2, column 2 of sheet 'Data'"
    ):
        open_table(path)
    book = openpyxl.load_workbook(path)
    book["Data"]["B2"] = 1
    book["Data"].merge_cells("B2:B3")
    book.save(path)
    with pytest.raises(DatasetError, match="cells B2:B3 of sheet 'Data' are merged"):
        open_table(path)


# rows above the data


def test_comments_above_the_header_name_columns_too(tmp_path: Path) -> None:
    text = "#Patient\tStatus of life\n#Who\tHow\n#STRING\tSTRING\n#1\t1\nPID\tSTATUS\np\t1\n"
    table = table_of(tmp_path, text, "Status of life")
    assert table.rows == ({"PID": "p", "STATUS": "1", "Status of life": "1"},)
    assert table.lines == (6,)
    assert table.notes == ("lines 1, 2, 3, ... (4) with '#' above the header: no rows",)


def test_one_line_with_a_number_sign_is_the_header(tmp_path: Path) -> None:
    assert table_of(tmp_path, "#id,label\na,x\n").columns == ("id", "label")


def test_further_header_rows_name_columns_too(tmp_path: Path) -> None:
    text = (
        "uuid\tbarcode\tdeath_days_to\n"
        "uuid\tbarcode\tdays_to_death\n"
        "CDE_ID:\tCDE_ID:200\tCDE_ID:316\n"
        "u1\tP1\t12\n"
    )
    table = table_of(tmp_path, text, "days_to_death")
    assert [row["days_to_death"] for row in table.rows] == ["12"]
    assert table.lines == (4,)


def test_a_row_that_repeats_one_name_is_no_header(tmp_path: Path) -> None:
    table = table_of(tmp_path, "slide_id,dead\na,dead\nb,alive\n")
    assert len(table.rows) == 2


def test_a_title_above_the_header_is_said(tmp_path: Path) -> None:
    table = table_of(tmp_path, "Table S1\n\nid,label\na,x\nb,y\n")
    assert table.columns == ("id", "label")
    assert table.notes == ("line 1 above the header: a title",)


def test_a_repeated_header_is_no_row(tmp_path: Path) -> None:
    table = table_of(tmp_path, "id,label\na,x\nid,label\nb,y\n")
    assert [row["id"] for row in table.rows] == ["a", "b"]
    assert table.notes == ("the header is repeated at line 3",)


# what is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,label, label \na,x,y\n", "got 'label' as columns 2 and 3 in line 1"),
        ("id,label\na,x\nb,y,z\n", "got 3 for 2 columns in line 3"),
        ("id,label\na,x\nb\n", "got fewer in line 3"),
        ('id,label\na,x\nb,"y\nc,z\n', "quotes of a table must close.* in line 3"),
        ("id,label\na,x\nb,\0\n", "NUL character in line 3"),
        ("id,label\n", "must have rows, got none"),
        ("", "it is empty"),
        ('{"a": [1]}', "it is a JSON file"),
        ("<!DOCTYPE html><html></html>", "a web page"),
        ("A text, of words.\nIt has\na, b, c, d\nand more, or\nless\n", "cells"),
    ],
)
def test_what_may_be_shifted_or_is_no_table_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(DatasetError, match=words):
        table_of(tmp_path, text)


def test_cells_beyond_the_header_that_are_empty_shift_nothing(tmp_path: Path) -> None:
    table = table_of(tmp_path, "id,label\na,x,,\nb,y,,\n")
    assert [row["label"] for row in table.rows] == ["x", "y"]


def test_tabs_that_an_editor_cut_off_are_said(tmp_path: Path) -> None:
    table = table_of(tmp_path, "id\tlabel\tx\na\ty\t1\nb\ty\n")
    assert table.rows[1] == {"id": "b", "label": "y", "x": ""}
    assert table.notes == ("cells are missing at the end of line 3",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), r"\.xls"),
        (b"\x89PNG\r\n\x1a\n" + bytes(60), "PNG"),
        (b"%PDF-1.7\n", "PDF"),
        (b"PK\x03\x04" + bytes(60), "damaged workbook"),
        (b"\x89HDF\r\n\x1a\n" + bytes(60), "HDF5"),
        (bytes(range(256)) * 4, "binary file"),
        (b"\x1f\x8b\x08\0" + bytes(60), "gzip"),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_what_it_is(
    tmp_path: Path, content: bytes, words: str
) -> None:
    with pytest.raises(DatasetError, match=words):
        table_of(tmp_path, content)


def test_an_archive_is_named_by_its_members(tmp_path: Path) -> None:
    import zipfile

    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("word/document.xml", "x")
    with pytest.raises(DatasetError, match=r"a Word document \(.docx\)"):
        table_of(tmp_path, buffer.getvalue())


def test_a_column_that_is_missing_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="the column 'lable', got id, label in"):
        table_of(tmp_path, "id,label\na,x\n", "lable")


def test_errors_are_of_the_class_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CohortError, match="readable file"):
        open_table(tmp_path / "none.csv", error=CohortError)
