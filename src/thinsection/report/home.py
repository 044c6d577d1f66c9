"""The results folder to which a page belongs: the way back to its index."""

import os
from pathlib import Path
from urllib.parse import quote

from thinsection.report.index import INDEX, RUNS, write_index
from thinsection.store.ledger import SLIDES


def is_results_folder(folder: Path) -> bool:
    """True for a folder with slides and records of runs."""
    return (folder / SLIDES).is_dir() and (folder / RUNS).parent.is_dir()


def results_above(folder: Path) -> Path | None:
    """Nearest results folder that contains a folder, or is this folder; None if there is none."""
    for parent in (folder.absolute(), *folder.absolute().parents):
        if is_results_folder(parent):
            return parent
    return None


def index_address(folder: Path, results: Path | None = None) -> str | None:
    """Address of the results' index on a page in a folder, such as '../../index.html'.

    Args:
        folder: folder of the page.
        results: the results from which the page was made, if the page lies outside of them.

    Returns:
        None if the page belongs to no results folder.
    """
    home = results_above(folder)
    if home is None and results is not None:
        home = results_above(results)
    if home is None:
        return None
    return quote(os.path.relpath(home / INDEX, folder.absolute()).replace(os.sep, "/"))


def refresh_index(folder: Path) -> None:
    """Writes the index of the results folder that contains a folder, if there is one."""
    home = results_above(folder)
    if home is not None:
        write_index(home)
