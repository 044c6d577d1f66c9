"""Order of classes: read from their numbers, and never guessed."""

import pytest

from thinsection.evaluation.cell_values import ordered_classes


@pytest.mark.parametrize(
    "names",
    [
        ("1", "2", "10"),
        ("-1", "0", "1"),
        ("ISUP 1", "isup 2", "ISUP 3"),
        ("G1", "G2", "G3"),
        ("1 low", "2 middle", "3 high"),
        ("grade I", "grade II", "grade III", "grade IV"),
        ("Stage I", "Stage IIA", "Stage IIB", "Stage III", "Stage IX"),
        ("pT1", "pT2a", "pT2b", "pT3"),
        ("0", "0.5", "1.5"),
    ],
)
def test_the_number_in_a_name_gives_the_order(names: tuple[str, ...]) -> None:
    assert ordered_classes(names[::-1]) == names
    assert ordered_classes((*names[1:], names[0])) == names


@pytest.mark.parametrize(
    "names",
    [
        ("low", "high"),
        ("G1", "G2", "GX"),
        ("Gleason 3+4", "Gleason 4+3", "Gleason 4+4"),
        ("<5", ">10"),
        ("G1", "pT2"),
        ("2 of left", "2 of right", "1"),
        ("Stage 0", "Stage -1"),
    ],
)
def test_names_that_may_have_another_order_have_none(names: tuple[str, ...]) -> None:
    assert ordered_classes(names) is None
