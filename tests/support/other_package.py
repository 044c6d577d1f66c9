"""Another package beside ours: one module and its entry points, as an installer leaves them."""

import os
import subprocess
import sys
from pathlib import Path


def install(
    folder: Path, module: str, source: str, group: str, **points: str
) -> dict[str, str]:
    """Writes the package to `folder/site`.

    Args:
        folder: that takes it.
        module: its name; the package's, too.
        source: text of the module.
        group: of its entry points, without 'thinsection.'.
        points: name of each entry point -> attribute of the module.

    Returns:
        The environment of a process in which it is installed.
    """
    site = folder / "site"
    info = site / f"{module}-0.1.dist-info"
    info.mkdir(parents=True)
    (site / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n"
    )
    lines = [f"{name} = {module}:{attribute}" for name, attribute in points.items()]
    text = "\n".join([f"[thinsection.{group}]", *lines])
    (info / "entry_points.txt").write_text(text + "\n")
    paths = [str(site), *filter(None, sys.path)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}


def in_python(
    environment: dict[str, str], *arguments: object
) -> subprocess.CompletedProcess[str]:
    """The end of `python ARGUMENTS` in that environment."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300
    )


def in_shell(
    environment: dict[str, str], *arguments: object
) -> subprocess.CompletedProcess[str]:
    """The end of `thinsection ARGUMENTS` in that environment."""
    return in_python(environment, "-m", "thinsection", *arguments)
