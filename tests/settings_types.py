"""Writes `src/thinsection/settings_types.py`: `python -m tests.settings_types`.

The settings of `ts.run(..., tile_px=512)` are the fields of dataclasses. Type checkers and editors
read sources only, so the names and types of the fields are written once more, as TypedDicts.
"""

import inspect
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path

from thinsection.config import field_types, flat_fields
from thinsection.predict.config import TrainConfig
from thinsection.predict.experiment import train
from thinsection.predict.heatmap import HeatmapRunConfig, heatmap
from thinsection.predict.predicting import PredictRunConfig, predict
from thinsection.predict.zeroshot import ZeroshotRunConfig, zeroshot
from thinsection.run.plan import plan
from thinsection.run.run import run
from thinsection.stages.config import RunConfig
from thinsection.tiles.grid import TilesConfig, tile_grid
from thinsection.view.server import view
from thinsection.view.shown import ViewConfig

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "src" / "thinsection" / "settings_types.py"
# class, the configuration whose settings it holds, and the functions that take it
SETTINGS: list[tuple[str, type, tuple[Callable[..., object], ...]]] = [
    ("RunSettings", RunConfig, (run, plan)),
    ("TilesSettings", TilesConfig, (tile_grid,)),
    ("TrainSettings", TrainConfig, (train,)),
    ("PredictSettings", PredictRunConfig, (predict,)),
    ("HeatmapSettings", HeatmapRunConfig, (heatmap,)),
    ("ZeroshotSettings", ZeroshotRunConfig, (zeroshot,)),
    ("ViewSettings", ViewConfig, (view,)),
]
HEAD = '''"""Settings that functions take as keywords, as type checkers and editors see them.

Written by `python -m tests.settings_types` from the fields of the configurations, which have the
defaults and the help. A setting that a function takes as a parameter of its own is left out.
"""

from pathlib import Path
from typing import Literal, TypeAlias, TypedDict

Text: TypeAlias = str | Path  # a path stands for its text
Texts: TypeAlias = list[str] | list[Path] | tuple[str | Path, ...]
'''


def text() -> str:
    """Content of the file."""
    parts = [HEAD]
    for name, config, functions in SETTINGS:
        parts += ["", "", *_class_lines(name, config, functions)]
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"],
        input="\n".join(parts) + "\n",
        cwd=ROOT,  # a file beside the target has the name of a library
        capture_output=True,
        text=True,
        check=True,
    )
    return formatted.stdout


def _class_lines(
    name: str, config: type, functions: tuple[Callable[..., object], ...]
) -> list[str]:
    """Lines of one TypedDict."""
    own: set[str] = set()
    for function in functions:
        own |= inspect.signature(function).parameters.keys()
    named = " and ".join(f"`{function.__name__}`" for function in functions)
    lines = [
        f"class {name}(TypedDict, total=False):",
        f'    """Settings of {named}: `{config.__name__}` has defaults and help."""',
        "",
    ]
    for setting, kind in _kinds(config).items():
        if setting not in own:
            lines.append(f"    {setting}: {' | '.join(_rendered(kind))}")
    return lines


def _kinds(config: type) -> dict[str, object]:
    """Type of each setting of a configuration: of its sections, or its own."""
    flat = flat_fields(config)
    if flat:
        return {setting: kind for setting, (_, _, kind) in flat.items()}
    return field_types(config)


def _rendered(kind: object) -> list[str]:
    """Members of the union of what `config.coerce` takes for a type."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        members: list[str] = []
        for argument in arguments:
            members += _rendered(argument)
        return list(dict.fromkeys(members))
    if origin is typing.Literal:
        return [f"Literal[{', '.join(_quoted(value) for value in arguments)}]"]
    if origin is tuple:
        items = _rendered(arguments[0])
        if items == ["Text"]:
            return ["Texts"]
        joined = " | ".join(items)
        return [f"list[{joined}]", f"tuple[{joined}, ...]"]
    if kind in (str, Path):
        return ["Text"]
    if kind is type(None):
        return ["None"]
    if kind in (int, float, bool):
        return [typing.cast(type, kind).__name__]
    raise TypeError(f"a setting must be of a type that is written here, got {kind}")


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
