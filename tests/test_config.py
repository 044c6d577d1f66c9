"""Settings: one default, checked values, unknown keys refused by nearest name."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinsection.config import (
    as_mapping,
    dump_toml,
    flat_fields,
    from_mapping,
    read_toml,
    replace_flat,
    toml_key,
    toml_value,
)
from thinsection.errors import ConfigError
from thinsection.stages.config import RunConfig
from thinsection.types import format_bytes, parse_bytes


def test_field_names_are_unique_over_the_sections_of_a_run() -> None:
    assert flat_fields(RunConfig)["overlap"][0] == "tiles"


def test_the_written_toml_reads_back_to_the_same_settings(tmp_path: Path) -> None:
    config = replace_flat(
        RunConfig(), {"tile_px": 512, "write": ["tsv"], "slide_mpp": "0.25"}
    )
    (tmp_path / "run.toml").write_text(dump_toml(config))
    assert from_mapping(RunConfig, read_toml(tmp_path / "run.toml")) == config
    (tmp_path / "default.toml").write_text(dump_toml(RunConfig()))
    assert from_mapping(RunConfig, read_toml(tmp_path / "default.toml")) == RunConfig()


TEXT = st.text() | st.sampled_from(
    ["\0\x1f\x7f", "🔬 \U0010ffff", '"quo"te\\', "a\r\nb"]
)
SCALARS = (
    TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)
)


@given(TEXT, VALUES)
def test_every_value_is_one_line_of_toml_that_reads_back_the_same(
    name: str, value: Any
) -> None:
    line = f"{toml_key(name)} = {toml_value(value)}"
    assert "\n" not in line
    found = tomllib.loads(f"# a comment\n{line}\n[next]\n")[name]
    assert found == value
    assert repr(found) == repr(value)  # the type too: 1 is not 1.0 and not True


@given(TEXT, st.lists(TEXT))
def test_settings_of_any_text_read_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, text: str, names: list[str]
) -> None:
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    config = replace_flat(RunConfig(), {"weights": text, "qc_fail": names})
    path.write_text(dump_toml(config), encoding="utf-8", newline="")
    assert from_mapping(RunConfig, read_toml(path)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[tiles]\noverlpa = 3",
            "unknown config key 'tiles.overlpa'; did you mean 'tiles.overlap'",
        ),
        ("[tile]\n", "unknown config key 'tile'; did you mean 'tiles'"),
        ("[tiles]\ntile_px = 'big'", "tiles.tile_px must be int, got 'big'"),
        ("[tiles]\ntile_px = true", "tiles.tile_px must be int, got True"),
        ("[tiles]\nedge = 'cut'", "tiles.edge must be one of drop, pad, got 'cut'"),
        ("[tiles]\ntile_filter = 'tissue'", "tiles.tile_filter must be a list"),
        ("tiles = 3", "tiles must be a table, got 3"),
        ("[tiles", "config must be TOML"),
    ],
)
def test_bad_toml_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        from_mapping(RunConfig, read_toml(tmp_path / "run.toml"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"existing file, got '.*none.toml'"):
        from_mapping(RunConfig, read_toml(tmp_path / "none.toml"))


def test_integers_are_taken_for_floats_and_the_rest_is_plain() -> None:
    config = replace_flat(RunConfig(), {"mask_mpp": 4})
    assert as_mapping(config)["tissue"]["mask_mpp"] == 4.0


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("1.5 kB", 1500), ("7", 7), (1024, 1024), ("3m", 3 * 10**6)],
)
def test_sizes_are_read_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "2 apples", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="memory must be a size"):
        parse_bytes(text, name="memory")


def test_sizes_are_shown_in_the_largest_fitting_unit() -> None:
    assert [format_bytes(n) for n in (5, 2048, 3 << 30)] == [
        "5 B",
        "2.0 KiB",
        "3.0 GiB",
    ]


@pytest.mark.parametrize("data", [[0, 1], "text", 3, None])
def test_a_value_that_is_no_table_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="config must be a table of keys, got"):
        from_mapping(RunConfig, data)
