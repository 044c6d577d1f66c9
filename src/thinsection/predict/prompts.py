"""Classes in words: a TOML file with the names of each class and the sentences around them.

templates = ["an H&E image of {}."]     # {} is the name; without templates: the name alone

[classes]
tumour = ["adenocarcinoma", "malignant glands"]
stroma = ["fibrous stroma"]
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from thinsection.config import nearest, read_toml
from thinsection.errors import ConfigError
from thinsection.types import Json
from thinsection.weights.origin import slug

_KEYS = ("templates", "classes")
_PLACE = "{}"


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Classes of a zero-shot classifier, in their order, and the templates of their names."""

    classes: Mapping[str, tuple[str, ...]] = field(hash=False)  # class -> its names
    templates: tuple[str, ...] = (_PLACE,)
    name: str = "prompts"  # part of the name of the results

    def texts(self, class_name: str) -> list[str]:
        """Every name of a class in every template."""
        return [
            template.replace(_PLACE, name)
            for name in self.classes[class_name]
            for template in self.templates
        ]


def read_prompts(path: str | Path) -> Prompts:
    """Prompts of a TOML file.

    Raises ConfigError: no such file, not TOML, an unknown key, fewer than two classes, a class
    without names, a template without {}; it names the file and the key.
    """
    path = Path(path)
    table = read_toml(path)
    for key in table:
        if key not in _KEYS:
            raise ConfigError(
                f"prompts must have the keys {' and '.join(_KEYS)}, got {key!r} in "
                f"{str(path)!r}{nearest(key, _KEYS)}"
            )
    classes = table.get("classes")
    if not isinstance(classes, dict) or len(classes) < 2:
        number = len(classes) if isinstance(classes, dict) else 0
        raise ConfigError(
            f"prompts must have a table [classes] of >= 2 classes, got {number} in "
            f'{str(path)!r}; add a line such as stroma = ["fibrous stroma"]'
        )
    templates = [_PLACE]
    if "templates" in table:
        templates = list(_sentences(table["templates"], "templates", path))
    for template in templates:
        if _PLACE not in template:
            raise ConfigError(
                f"templates must have {_PLACE} at the place of the name, got {template!r} in "
                f"{str(path)!r}"
            )
    names = {}
    for name, values in classes.items():
        if slug(name) != name:
            raise ConfigError(
                "classes must have names of letters, digits, '_', '-' and '.', got "
                f"{name!r} in {str(path)!r}; the words for the model stand behind the ="
            )
        names[name] = tuple(_sentences(values, f"classes.{name}", path))
    return Prompts(classes=names, templates=tuple(templates), name=slug(path.stem))


def _sentences(values: Json, key: str, path: Path) -> Iterator[str]:
    """Texts of a list that has at least one."""
    if not isinstance(values, list) or not values:
        raise ConfigError(
            f"{key} must be a list of at least one text, got {values!r} in {str(path)!r}; "
            'write ["adenocarcinoma"]'
        )
    for value in values:
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(
                f"{key} must have texts that are not empty, got {value!r} in {str(path)!r}"
            )
        yield value
