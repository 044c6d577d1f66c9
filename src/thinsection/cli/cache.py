"""`thinsection cache`: what features are kept, whether they are whole, and how to remove them."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

Root = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="Folder of caches. [default: the user's cache folder]"),
]
Name = Annotated[str, typer.Argument(help="A name that `cache ls` shows.")]

EXIT_DAMAGED = 1


def register(root: typer.Typer) -> None:
    """Adds the group `cache`."""
    root.add_typer(app, name="cache", help="Feature caches: list, verify, remove.")


@app.command("ls")
def ls(cache_dir: Root = None) -> None:
    """Lists caches with their size, shape, stored dtypes and state."""
    from thinsection.store.cache import list_caches
    from thinsection.units import format_bytes

    root = _root(cache_dir)
    entries = list_caches(root)
    for entry in entries:
        facts = f"{entry.name}  {entry.state}  {format_bytes(entry.data_bytes)}"
        if entry.manifest is not None:
            shape = " x ".join(map(str, entry.manifest.shape))
            dtypes = ", ".join(f"{n} rows {d}" for d, n in entry.manifest.dtype_rows.items())
            facts += f"  {shape}  {dtypes}  {entry.manifest.created}"
            if entry.manifest.loss is not None:
                facts += f"  lossy, largest error {entry.manifest.loss.max_abs_error:.3g}"
        elif entry.state == "unfinished":
            facts += f"  {entry.rows_kept} rows kept; the same command continues"
        else:
            facts += f"  {entry.problem}"
        print(facts)
    print(f"{len(entries)} caches in {root}")


@app.command("verify")
def verify(name: Name, cache_dir: Root = None) -> None:
    """Reads every byte of a cache against its checksums; exit code 1 if one is wrong."""
    from thinsection.store.cache import verify_cache

    damaged = verify_cache(_root(cache_dir), name)
    if damaged:
        shown = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
        print(f"{name}: {len(damaged)} damaged rows ({shown}); remove it and compute it again")
        raise typer.Exit(EXIT_DAMAGED)
    print(f"{name}: whole")


@app.command("rm")
def rm(name: Name, cache_dir: Root = None) -> None:
    """Removes a cache; refused while a process writes it."""
    from thinsection.store.cache import remove_cache
    from thinsection.units import format_bytes

    size = remove_cache(_root(cache_dir), name)
    print(f"{name}: removed, {format_bytes(size)} free again")


def _root(cache_dir: Path | None) -> Path:
    from thinsection.store.cache import default_root

    return default_root() if cache_dir is None else cache_dir
