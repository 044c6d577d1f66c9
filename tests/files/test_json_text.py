"""Any text is a value or a ValueError."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinsection.files.atomic import MAX_DEPTH, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_a_value_is_that_of_the_standard_library(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("kind", ["[{}]", '{{"a": {}}}'])
def test_depth_is_bounded(kind: str) -> None:
    def nested(depth: int) -> str:
        text = "1"
        for _ in range(depth):
            text = kind.format(text)
        return text

    assert parse_json(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 500, 5_000):
        with pytest.raises(ValueError, match="nested at most 64 deep"):
            parse_json(nested(depth))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000, "", "[1", b"\xff"])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
