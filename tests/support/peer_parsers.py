"""Reads from the sources of other tools which commands, options and settings they have.

`python -m tests.support.peer_parsers FOLDER` writes `tests/docs/peers.json`, which the page "From
other tools" is compared with. FOLDER has a clone of each repository, as `OWNER+NAME`. A tool
without a clone keeps what the file says. Only names are copied.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parents[1] / "docs" / "peers.json"
Facts = dict[str, Any]


class Clone:
    """Files of a repository at its newest commit.

    Attributes:
        repository: `OWNER/NAME` on GitHub.
        commit: full name of the commit.
    """

    def __init__(self, folder: Path, repository: str) -> None:
        place = folder / repository.replace("/", "+")
        self._path = place / "repo" if (place / "repo").exists() else place
        self.repository = repository
        self.commit = self._git("rev-parse", "HEAD").strip()

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self._path), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout

    def tree(self, path: str) -> ast.Module:
        """Syntax tree of a file of Python."""
        return ast.parse(self.text(path))

    def text(self, path: str) -> str:
        """Text of a file."""
        return self._git("show", f"HEAD:{path}")

    def files(self, folder: str) -> list[str]:
        """Files below a folder."""
        return self._git("ls-tree", "-r", "--name-only", "HEAD", folder).split()


def calls_of(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Calls of a function or method of this name, in order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            if getattr(called, "attr", getattr(called, "id", "")) == name:
                yield node


def texts_in(nodes: list[ast.expr]) -> list[str]:
    """Literal texts among expressions."""
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def argparse_options(tree: ast.AST) -> dict[str, list[str]]:
    """Option of `add_argument` -> its choices, where these are written out."""
    options: dict[str, list[str]] = {}
    for call in calls_of(tree, "add_argument"):
        choices: list[str] = []
        for keyword in call.keywords:
            if keyword.arg == "choices" and isinstance(keyword.value, ast.List):
                choices = texts_in(keyword.value.elts)
        for name in texts_in(call.args):
            if name.startswith("-"):
                options[name] = choices
    return options


def required_options(tree: ast.AST) -> list[str]:
    """Options of `add_argument` that must be given."""
    names = []
    for call in calls_of(tree, "add_argument"):
        for keyword in call.keywords:
            if keyword.arg == "required" and ast.unparse(keyword.value) == "True":
                names += texts_in(call.args)
    return names


def keys_of_dict(tree: ast.Module, name: str) -> list[str]:
    """Keys of a dict that a module assigns to a name."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != name:
            continue
        if isinstance(node.value, ast.Dict):
            return texts_in([key for key in node.value.keys if key])
    raise LookupError(name)


def fields_of(tree: ast.AST, *classes: str) -> list[str]:
    """Annotated fields of classes."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in classes:
            lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            names += [ast.unparse(line.target) for line in lines]
    return names


def values_of_enum(tree: ast.AST, name: str) -> list[str]:
    """Values of the members of an enumeration."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            lines = [line for line in node.body if isinstance(line, ast.Assign)]
            return texts_in([line.value for line in lines])
    raise LookupError(name)


def parameters_of(tree: ast.AST) -> dict[str, list[str]]:
    """Function -> names of its parameters."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found[node.name] = [argument.arg for argument in listed]
    return found


def yaml_keys(text: str) -> list[str]:
    """Dotted keys of a YAML file whose blocks are indented by two spaces."""
    keys = []
    above: list[str] = []
    for line in text.splitlines():
        name, colon, _ = line.strip().partition(":")
        if colon and name.isidentifier():
            depth = (len(line) - len(line.lstrip())) // 2
            above = [*above[:depth], name]
            keys.append(".".join(above))
    return keys


def trident(clone: Clone) -> Facts:
    """TRIDENT: one program with options."""
    tree = clone.tree("run_batch_of_slides.py")
    options = argparse_options(tree)
    for option, room in (("--patch_encoder", "patch"), ("--slide_encoder", "slide")):
        registry = clone.tree(f"trident/{room}_encoder_models/load.py")
        options[option] = keys_of_dict(registry, "encoder_registry")
    program = {"options": options, "required": required_options(tree)}
    return {"programs": {"run_batch_of_slides.py": program}}


def clam(clone: Clone) -> Facts:
    """CLAM: several programs with options."""
    names = ("create_patches_fp", "extract_features_fp", "create_splits_seq", "main")
    names += ("eval", "create_heatmaps")
    programs = {}
    for name in names:
        options = argparse_options(clone.tree(f"{name}.py"))
        programs[f"{name}.py"] = {"options": options, "required": []}
    return {"programs": programs}


def stamp(clone: Clone) -> Facts:
    """STAMP: commands, and a configuration file with sections."""
    tree = clone.tree("src/stamp/__main__.py")
    commands = [
        name for call in calls_of(tree, "add_parser") for name in texts_in(call.args)
    ]
    settings: list[str] = []
    for room in ("preprocessing", "modeling", "heatmaps"):
        config = clone.tree(f"src/stamp/{room}/config.py")
        classes = [
            node.name
            for node in ast.walk(config)
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
        ]
        settings += fields_of(config, *classes)
    registry = clone.tree("src/stamp/modeling/registry.py")
    program = {
        "options": argparse_options(tree),
        "required": [],
        "commands": commands,
    }
    return {
        "programs": {"stamp": program},
        "settings": sorted(set(settings)),
        "models": values_of_enum(registry, "ModelName"),
    }


def slide2vec(clone: Clone) -> Facts:
    """slide2vec: one program with a configuration file."""
    tree = clone.tree("slide2vec/cli.py")
    encoders: list[str] = []
    for path in clone.files("slide2vec/encoders/models"):
        if path.endswith(".py"):
            for call in calls_of(clone.tree(path), "register_encoder"):
                encoders += texts_in(call.args)
    program = {"options": argparse_options(tree), "required": []}
    return {
        "programs": {"slide2vec": program},
        "settings": yaml_keys(clone.text("slide2vec/configs/default.yaml")),
        "models": sorted(encoders),
    }


def lazyslide(clone: Clone) -> Facts:
    """LazySlide: commands with options, and functions of Python."""
    commands = parameters_of(clone.tree("src/lazyslide/__main__.py"))
    commands = {name: words for name, words in commands.items() if name[0] != "_"}
    functions: dict[str, list[str]] = {}
    for path in (
        "preprocess/_tissue.py",
        "preprocess/_tiles.py",
        "tools/_features.py",
    ):
        functions |= parameters_of(clone.tree(f"src/lazyslide/{path}"))
    shown = ("find_tissues", "tile_tissues", "feature_extraction")
    programs = {}
    for name in ("info", "preprocess", "qc", "feature", "agg"):
        options = {f"--{word.replace('_', '-')}": [] for word in commands[name]}
        programs[f"lazyslide {name}"] = {"options": options, "required": []}
    return {
        "programs": programs,
        "functions": {name: functions[name] for name in shown},
    }


def tiatoolbox(clone: Clone) -> Facts:
    """TIAToolbox: commands with options, each made by a function of `common.py`."""
    by_function: dict[str, list[str]] = {}
    for node in clone.tree("tiatoolbox/cli/common.py").body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("cli_"):
            named = [
                n for call in calls_of(node, "option") for n in texts_in(call.args)
            ]
            by_function[node.name] = [name for name in named if name.startswith("-")]
    programs = {}
    for command in ("deep_feature_extractor", "tissue_mask"):
        tree = clone.tree(f"tiatoolbox/cli/{command}.py")
        options: dict[str, list[str]] = {}
        for function, names in by_function.items():
            if any(calls_of(tree, function)):
                options |= {name: [] for name in names}
        for call in calls_of(tree, "option"):
            options |= {name: [] for name in texts_in(call.args)}
        program = {"options": options, "required": []}
        programs[f"tiatoolbox {command.replace('_', '-')}"] = program
    return {"programs": programs}


def histoqc(clone: Clone) -> Facts:
    """HistoQC: one program, and configurations by name."""
    options = argparse_options(clone.tree("histoqc/_parser.py"))
    names = [Path(path).stem for path in clone.files("histoqc/config/")]
    presets = [name.partition("_")[2] for name in names if name.startswith("config_")]
    options["-c"] = options["--config"] = presets
    return {"programs": {"histoqc": {"options": options, "required": []}}}


READERS = {
    "TRIDENT": ("mahmoodlab/TRIDENT", trident),
    "CLAM": ("mahmoodlab/CLAM", clam),
    "STAMP": ("KatherLab/STAMP", stamp),
    "slide2vec": ("clemsgrs/slide2vec", slide2vec),
    "LazySlide": ("rendeirolab/LazySlide", lazyslide),
    "TIAToolbox": ("TissueImageAnalytics/tiatoolbox", tiatoolbox),
    "HistoQC": ("choosehappy/HistoQC", histoqc),
}


def facts_in(folder: Path) -> Facts:
    """Facts of the tools that have a clone in a folder."""
    found: Facts = {}
    for name, (repository, reader) in READERS.items():
        if (folder / repository.replace("/", "+")).is_dir():
            clone = Clone(folder, repository)
            found[name] = {"repository": repository, "commit": clone.commit}
            found[name] |= reader(clone)
    return found


def main(folder: str) -> None:
    """Writes what the clones say over the facts that are there."""
    facts = json.loads(FACTS.read_text()) if FACTS.is_file() else {}
    facts |= facts_in(Path(folder))
    FACTS.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
