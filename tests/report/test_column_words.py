"""Heads of the quality-control page: every column of every preset has words."""

import pytest

from thinsection.report.values import column_words
from thinsection.tiles.filters import MEASURES


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("pixels_to_use", "usable tissue, pixels"),
        ("ink", "ink, fraction"),
        ("folds_removed_percent", "folds (experimental): fraction"),
        ("qc_folds", "folds (experimental), fraction"),
        ("focus_removed_max_area", "out of focus: largest area, mm²"),
        ("my_check_num_regions", "my check: number of areas"),
        ("chan1_brightness", "brightness, red"),
        ("chan3_brightness_std_YUV", "brightness, chroma (V), standard deviation"),
        ("deconv_c1_std", "eosin, standard deviation"),
        ("background_energy_std", "background: texture energy, standard deviation"),
        ("template2_MSE_hist", "difference from the colours of template2"),
        ("qc_focus", "out of focus, fraction"),
        ("qc_ink", "ink, fraction"),
        ("ink_color", "most frequent colour of ink"),
        ("px_std_red", "red, standard deviation"),
        ("macenko_eosin_strength", "eosin vector, strength"),
        ("brightestPixels", "brightest pixels, fraction"),
        ("ownColumn_x", "own Column x"),
    ],
)
def test_a_column_has_plain_words(column: str, words: str) -> None:
    assert column_words(column) == words


def test_words_have_no_underscore_and_differ_between_measures() -> None:
    words = [column_words(column) for column in MEASURES]
    assert not any("_" in text for text in words)
    assert len(set(words)) == len(MEASURES)
