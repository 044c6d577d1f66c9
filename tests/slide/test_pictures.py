"""Which picture of a file is the slide, how another one is chosen, and what is said of the rest."""

import pytest

from thinsection.errors import ImageError
from thinsection.slide.pictures import (
    Picture,
    Role,
    choose_picture,
    only_picture,
    picture_notes,
    role_of_name,
)
from thinsection.types import Size


def picture(number: int, role: Role, size: Size, name: str = "") -> Picture:
    return Picture(number=number, name=name, role=role, rule="said so", size=size)


PICTURES = (
    picture(1, "macro", (9000, 9000), "macro image"),
    picture(2, "slide", (1000, 700), "area 1"),
    picture(3, "slide", (2048, 1536), "area 2"),
    picture(4, "slide", (1536, 2048), "Area 3"),
    picture(5, "plane", (4096, 4096), "area 2, z 1"),
    picture(6, "other", (8000, 8000), "2"),
)


def test_the_largest_slide_is_chosen_and_of_equal_ones_the_first() -> None:
    assert choose_picture(PICTURES, None, slide_path="a.tif").number == 3
    assert choose_picture(PICTURES[::-1], None, slide_path="a.tif").number == 4


@pytest.mark.parametrize(
    ("image", "number"), [(4, 4), ("4", 4), ("area 3", 4), ("2", 6), ("Macro Image", 1)]
)
def test_a_name_wins_over_a_number_and_any_picture_can_be_named(
    image: str | int, number: int
) -> None:
    assert choose_picture(PICTURES, image, slide_path="a.tif").number == number


@pytest.mark.parametrize("image", ["7", "0", "area", ""])
def test_an_image_that_is_not_there_is_refused_with_the_list(image: str) -> None:
    rule = r"image must be a picture of the file, got .* in 'a.tif'.*3 'area 2' \(slide"
    with pytest.raises(ImageError, match=rule):
        choose_picture(PICTURES, image, slide_path="/x/a.tif")


def test_a_name_of_two_pictures_is_refused() -> None:
    twins = (picture(1, "slide", (9, 9), "a"), picture(2, "slide", (8, 8), "a"))
    with pytest.raises(ImageError, match="image must name one picture, got 'a'"):
        choose_picture(twins, "a", slide_path="a.tif")


def test_a_file_without_a_slide_is_refused_with_its_inventory() -> None:
    left = (PICTURES[0], PICTURES[5])
    with pytest.raises(ImageError, match=r"1 'macro image' \(macro, 9000 x 9000 px\)"):
        choose_picture(left, None, slide_path="a.tif")
    assert choose_picture(left, "1", slide_path="a.tif").role == "macro"


def test_the_note_says_what_is_shown_why_what_is_not_and_how_to_choose() -> None:
    (note,) = picture_notes(PICTURES[:3], PICTURES[2])
    assert note == (
        "image 3 of 3 is shown ('area 2', 2048 x 1536 px, the largest); not shown: "
        "1 'macro image' (macro, 9000 x 9000 px), 2 'area 1' (slide, 1000 x 700 px); "
        "--image chooses"
    )
    (note,) = picture_notes(PICTURES, PICTURES[2])
    assert "the first of the largest" in note
    (note,) = picture_notes(PICTURES, PICTURES[1], "area 1")
    assert "asked for" in note


def test_label_macro_and_thumbnail_beside_the_first_picture_are_no_news() -> None:
    slide = picture(1, "slide", (100, 100))
    usual = (slide, picture(2, "label", (9, 9)), picture(3, "thumbnail", (9, 9)))
    assert picture_notes(usual, slide) == ()
    after = (picture(1, "label", (9, 9)), picture(2, "slide", (100, 100)))
    (note,) = picture_notes(after, after[1])
    assert note.startswith("image 2 of 2 is shown (100 x 100 px, the only slide)")


def test_a_note_about_many_pictures_names_some_and_counts_the_others() -> None:
    many = [picture(number, "slide", (50, 50)) for number in range(1, 41)]
    (note,) = picture_notes(many, many[0])
    assert "7 (slide" in note
    assert "8 (slide" not in note
    assert "and 33 more" in note


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("macro image", "macro"),
        ("Label", "label"),
        ("slide1_LABEL", "label"),
        ("[Thumbnail]", "thumbnail"),
        ("overview of the glass", "macro"),
        ("labelled tumour", None),
        ("the label was lost here", None),
        ("area 1", None),
        ("", None),
    ],
)
def test_a_picture_is_named_by_its_first_or_last_word(
    name: str, role: Role | None
) -> None:
    assert role_of_name(name) == role


def test_a_reader_without_inventory_shows_the_first_picture_and_refuses_others() -> (
    None
):
    for image in (None, 1, "1"):
        only_picture(image, "new", "a.xyz")
    with pytest.raises(ImageError, match="reader 'new' shows the first picture only"):
        only_picture("2", "new", "a.xyz")
