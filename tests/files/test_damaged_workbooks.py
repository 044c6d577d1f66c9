"""A damaged workbook is refused by name, whatever its parser raises."""

import zipfile
from pathlib import Path

import numpy as np
import openpyxl
import pytest
from tests.support.mutants import mutate

from thinsection.errors import CohortError
from thinsection.files.tables import open_table


def workbook(path: Path) -> None:
    book = openpyxl.Workbook()
    for row in (("slide_id", "label"), ("a", "x"), ("b", "y"), ("c", "x")):
        book.worksheets[0].append(row)
    book.save(path)


def read_or_refuse(path: Path) -> bool:
    """True where the table was read; an error must name the file."""
    try:
        open_table(path, ("slide_id",), error=CohortError)
    except CohortError as error:
        assert path.name in str(error)
        return False
    return True


@pytest.mark.filterwarnings("ignore::UserWarning:openpyxl")
def test_bits_of_an_archive_and_of_its_members(tmp_path: Path) -> None:
    path = tmp_path / "labels.xlsx"
    workbook(path)
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    num_read = 0
    for number in range(60):
        rng = np.random.default_rng((7, number))
        if number % 2:
            path.write_bytes(mutate(good, rng)[0])
        else:  # a member, with a right checksum
            name = sorted(members)[number // 2 % len(members)]
            changed = {**members, name: mutate(members[name], rng)[0]}
            with zipfile.ZipFile(path, "w") as archive:
                for member, data in changed.items():
                    archive.writestr(member, data)
        num_read += read_or_refuse(path)
    assert 0 < num_read < 60
