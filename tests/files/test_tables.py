"""Tables: what is written is read back, and no spreadsheet runs what a cell says."""

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinsection.files.atomic import read_table, write_table

CELLS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0")
) | st.sampled_from(
    ["=1+1", "'=x", "''-2", "'", "-", "\t=a", "\r", "a=b", "'plain'", 'x,"y"\nz']
)


@given(
    st.lists(st.tuples(CELLS, CELLS), max_size=4), st.sampled_from(["a.csv", "a.tsv"])
)
def test_text_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], name: str
) -> None:
    path = tmp_path_factory.mktemp("table") / name
    write_table(path, rows, ["left", "=right"])
    assert read_table(path) == [{"left": left, "=right": right} for left, right in rows]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@sum", "\tx", "\rx", "'=1"])
def test_text_that_a_spreadsheet_would_run_is_marked_as_text(
    text: str, tmp_path: Path
) -> None:
    write_table(tmp_path / "a.csv", [[text]], ["a"])
    with (tmp_path / "a.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["a"], [f"'{text}"]]


def test_numbers_and_harmless_text_are_untouched_and_none_is_empty(
    tmp_path: Path,
) -> None:
    row = (-1, -2.5, np.float32(-0.1), "a-b", "1=1", None, True, float("nan"))
    write_table(tmp_path / "a.csv", [row], "abcdefgh")
    assert (tmp_path / "a.csv").read_text().splitlines()[
        1
    ] == "-1,-2.5,-0.1,a-b,1=1,,True,nan"


def test_columns_are_the_union_of_what_rows_have_and_gaps_stay_empty(
    tmp_path: Path,
) -> None:
    write_table(tmp_path / "a.csv", [{"id": "a", "x": 1}, {"id": "b", "y": 2}])
    assert (tmp_path / "a.csv").read_text() == "id,x,y\na,1,\nb,,2\n"
    write_table(tmp_path / "b.tsv", iter([{"id": "a", "x": 1}]), ["x", "id", "none"])
    assert (tmp_path / "b.tsv").read_text() == "x\tid\tnone\n1\ta\t\n"
    write_table(tmp_path / "c.csv", [], ["only", "header"])
    assert read_table(tmp_path / "c.csv") == []


def test_a_table_that_breaks_half_way_leaves_the_earlier_one(tmp_path: Path) -> None:
    write_table(tmp_path / "a.csv", [[1]], ["a"])

    def broken() -> object:
        yield [2]
        raise RuntimeError("no more rows")

    with pytest.raises(RuntimeError, match="no more rows"):
        write_table(tmp_path / "a.csv", broken(), ["a"])  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    assert (tmp_path / "a.csv").read_text() == "a\n1\n"
