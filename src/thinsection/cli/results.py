"""What is stored: results (`ls`, `view`, `efficiency`, `export`), caches of features (`cache`)."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinsection.cli.main import with_config
from thinsection.pipeline.peer_export import LAYOUTS, export_peer
from thinsection.types import format_bytes

FolderArgument = Annotated[
    Path, typer.Argument(help="A results folder.", show_default=False)
]
if TYPE_CHECKING:
    from thinsection.pipeline.folder import Results

_ROOT = typer.Option(
    "--cache-dir", help="Folder of caches. [default: the user's cache folder]"
)
Root = Annotated[Path | None, _ROOT]
_GRID = typer.Option(help="Which tile grid, where there are several.")
_FEATURES = typer.Option(help="Which embeddings, where there are several.")
Features = Annotated[str | None, _FEATURES]
Paths = Annotated[
    list[str], typer.Argument(help="Slides, folders, cohort CSV, results.")
]
H5ad = Annotated[Path, typer.Option(help="The .h5ad file.")]
GeoJson = Annotated[Path, typer.Option(help="Folder of the GeoJSON files.")]
Name = Annotated[str, typer.Argument(help="A name that `cache ls` shows.")]

EXIT_DAMAGED, EXIT_SOME_LEFT_OUT = 1, 3

app = typer.Typer()
exports = typer.Typer(
    no_args_is_help=True, help="Write results in other tools' formats."
)
caches = typer.Typer(no_args_is_help=True, help="Feature caches: list, verify, remove.")
app.add_typer(exports, name="export")
app.add_typer(caches, name="cache")


@app.command("ls")
def ls(
    folder: Annotated[
        str, typer.Argument(help="Results folder, or its URL (s3://, ...).")
    ],
) -> None:
    """Show what a results folder holds: grids, embeddings, slide embeddings, invocations.

    Examples:

        thinsection ls results

        thinsection ls s3://bucket/results
    """
    from thinsection.files.sources import is_url
    from thinsection.pipeline.folder import open_results

    if not is_url(folder):
        _show_results(folder, open_results(folder))
        return
    from thinsection.pipeline.remote_out import listing_of

    with listing_of(folder) as listed:
        _show_results(folder, open_results(listed))


def _show_results(name: str, results: "Results") -> None:
    """Prints the folders of results, the failures and the invocations."""
    width = max([len(row.address) for row in results.folders], default=0)
    print(f"{name}: {len(results.slides)} slides")
    for row in results.folders:
        facts = [
            str(row.facts[n]) for n in ("encoder", "slide_encoder") if row.facts.get(n)
        ]
        facts += [
            f"dim {row.facts[n]}" for n in ("dim", "slide_dim") if row.facts.get(n)
        ]
        size = f"{row.num_slides:>6} slides  {format_bytes(row.num_bytes):>10}"
        print(f"  {row.address:<{width}}  {size}  {', '.join(facts)}".rstrip())
    for slide_id, error in results.failures().items():
        print(f"  failed: {slide_id}: {error}")
    for record in results.records:
        counts = record.document.get("counts")
        told = (
            ", ".join(f"{n} {s}" for s, n in counts.items() if n)
            if counts
            else "not finished"
        )
        print(
            f"  records/{record.folder.name}  {record.document.get('command')}: {told}"
        )


@app.command("view")
@with_config("thinsection.view:ViewConfig")
def view(paths: Paths, config: Any = None) -> None:
    """Look at slides in the browser: deep zoom, layers of results, similar tiles. Read-only.

    Examples:

        thinsection view slides/

        thinsection view results slides/ --port 8765
    """
    from thinsection.view import Viewer

    with Viewer(paths, config) as viewer:
        port = viewer.url.split("/")[2].partition(":")[2]
        print(
            f"{viewer.url}\nopen this address in a browser of this machine; Ctrl-C ends it"
        )
        print(
            f"from elsewhere: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then the same address"
        )
        viewer.wait()


@app.command("efficiency")
def efficiency(folder: FolderArgument) -> None:
    """Requested against used by the newest invocation that did work, and what to ask for next.

    Example: thinsection efficiency results
    """
    from thinsection.pipeline.records import efficiency as analyse

    (analysis, page), console = analyse(folder), Console()
    table = Table("resource", "requested", "used", "share")
    for share in analysis.shares:
        part = "" if share.fraction is None else f"{share.fraction:.0%}"
        table.add_row(share.name, share.requested, share.used, part)
    console.print(table)
    for warning in analysis.warnings:
        console.print(f"warning: {warning}", style="bold red", markup=False)
    lines = [analysis.bottleneck]
    if analysis.next_request is not None:
        asked = (f"  {line}" for line in analysis.next_request.sbatch_lines())
        lines += ["ask for this next time:", *asked]
    console.print("\n".join([*lines, f"page: {page}"]), markup=False)


def _end(left_out: list[str], line: str) -> None:
    """Says what was left out and what was done; exit code 3 where something was."""
    print(*left_out, line, sep="\n")
    if left_out:
        raise typer.Exit(EXIT_SOME_LEFT_OUT)


@exports.command("anndata")
def export_anndata(
    folder: FolderArgument, out: H5ad, features: Features = None
) -> None:
    """X = tile embeddings, obsm['spatial'] = coordinates; for scanpy, squidpy and LazySlide.

    Example: thinsection export anndata results --out results/tiles.h5ad
    """
    from thinsection.pipeline.anndata import export_anndata as export

    left: list[str] = []
    count = export(folder, out, features=features, on_damage=left.append)
    _end(left, f"wrote {count} tiles to {out}")


@exports.command("qupath")
def export_qupath(
    folder: FolderArgument, out: GeoJson, grid: Annotated[str | None, _GRID] = None
) -> None:
    """A GeoJSON file a slide: outlines as annotations, tiles with their columns as detections.

    Example: thinsection export qupath results --out for_qupath
    """
    from thinsection.pipeline.qupath import SCRIPT
    from thinsection.pipeline.qupath import export_qupath as export

    left: list[str] = []
    count = export(folder, out, grid=grid, on_left_out=left.append)
    _end(left, f"{count} slides are in {out}; {SCRIPT} there imports them")


def _exporter(tool: str) -> Callable[..., None]:
    """The command `export TOOL`."""

    def export(
        folder: FolderArgument,
        out: Annotated[Path, typer.Option(help="The folder of that tool.")],
        features: Features = None,
        copy: Annotated[bool, typer.Option(help="Copies, no links.")] = False,
    ) -> None:
        left: list[str] = []
        how: dict[str, Any] = {
            "features": features,
            "copy": copy,
            "on_left_out": left.append,
        }
        count = export_peer(folder, out, tool, **how)
        _end(left, f"{count} slides are in {out} as {tool} reads them")

    return export


for _layout in LAYOUTS:
    exports.command(_layout.name, help=_layout.help)(_exporter(_layout.name))


@app.command("import")
def import_folder(
    tool: Annotated[str, typer.Argument(help="trident, clam, stamp or slide2vec.")],
    folder: Annotated[Path, typer.Argument(help="Its folder: job_dir, feat_dir, ...")],
    out: Annotated[Path, typer.Option(help="The results folder.")],
    slides: Annotated[
        list[str] | None, typer.Option(help="Slides or a cohort CSV.")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="Whose features CLAM's are.")
    ] = None,
) -> None:
    """Take another tool's coordinates, features and lists into a results folder.

    Example: thinsection import trident job_dir --out results --slides slides/
    """
    from thinsection.pipeline.peer_import import import_peer

    left: list[str] = []
    how: dict[str, Any] = {"encoder": encoder, "on_left_out": left.append}
    count = import_peer(folder, out, tool, slides=slides or (), **how)
    _end(left, f"{count} slides of {tool} are in {out}")


@app.command("verify")
def verify(folder: FolderArgument) -> None:
    """Read every file of results against its checksum; exit code 1 if one is damaged.

    Of a folder without ledgers, such as GRID/features_NAME, the datasets of its .h5 files.

    Example: thinsection verify results
    """
    from thinsection.pipeline.verify import verify as verified

    checked, damaged = verified(folder)
    print(*damaged, f"{checked} checksums, {len(damaged)} damaged", sep="\n")
    if damaged:
        print(
            "remove the damaged files and run the same command again: only these are made anew"
        )
        raise typer.Exit(EXIT_DAMAGED)


@caches.command("ls")
def list_caches(cache_dir: Root = None) -> None:
    """Lists caches with their size, shape, stored dtypes and state."""
    from thinsection.store import cache

    entries = cache.list_caches(root := cache_dir or cache.default_root())
    for entry in entries:
        facts = [entry.name, entry.state, format_bytes(entry.data_bytes)]
        if (manifest := entry.manifest) is not None:
            facts.append(" x ".join(map(str, manifest.shape)))
            facts.append(
                ", ".join(f"{n} rows {d}" for d, n in manifest.dtype_rows.items())
            )
            facts.append(manifest.created)
            if manifest.loss is not None:
                facts.append(f"lossy, largest error {manifest.loss.max_abs_error:.3g}")
        elif entry.state == "unfinished":
            facts.append(f"{entry.rows_kept} rows kept; the same command continues")
        else:
            facts.append(str(entry.problem))
        print(*facts, sep="  ")
    print(f"{len(entries)} caches in {root}")


@caches.command("verify")
def verify_cache(name: Name, cache_dir: Root = None) -> None:
    """Reads every byte of a cache against its checksums; exit code 1 if one is wrong."""
    from thinsection.store import cache

    if damaged := cache.verify_cache(cache_dir or cache.default_root(), name):
        shown = ", ".join(map(str, damaged[:10])) + (
            ", ..." if len(damaged) > 10 else ""
        )
        print(
            f"{name}: {len(damaged)} damaged rows ({shown}); remove it and compute it again"
        )
        raise typer.Exit(EXIT_DAMAGED)
    print(f"{name}: whole")


@caches.command("rm")
def remove_cache(name: Name, cache_dir: Root = None) -> None:
    """Removes a cache; refused while a process writes it."""
    from thinsection.store import cache

    size = cache.remove_cache(cache_dir or cache.default_root(), name)
    print(f"{name}: removed, {format_bytes(size)} free again")
