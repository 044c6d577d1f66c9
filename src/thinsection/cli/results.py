"""Commands for results (`ls`, `view`, `cite`, `export`, ...) and for feature caches (`cache`)."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from thinsection import __version__
from thinsection.cli.documents import (
    EfficiencyDocument,
    LsDocument,
    MergeDocument,
    VerifyDocument,
    print_document,
)
from thinsection.cli.flags import (
    EXIT_SOME_LEFT_OUT,
    AsJson,
    count_words,
    message_console,
    with_config,
)
from thinsection.exchange.peer_export import LAYOUTS, export_peer
from thinsection.types import counted, format_bytes

if TYPE_CHECKING:
    from thinsection.store.cache.catalogue import CacheEntry

FolderArgument = Annotated[
    Path, typer.Argument(help="Results folder.", show_default=False)
]
Features = Annotated[
    str | None,
    typer.Option(
        help="Embeddings to use, if the folder has several: 256px_0.5mpp/features_uni2_h, or a "
        "unique part of this name, such as uni2_h."
    ),
]
Cells = Annotated[
    str | None,
    typer.Option(help="Also, or in place of tiles, the cells of this name: cellvit."),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        help="Folder of the feature caches. [default: the user's cache folder]",
    ),
]
CacheName = Annotated[
    str, typer.Argument(help="Name of a cache, as `cache ls` shows it.")
]

EXIT_DAMAGED = 1

app = typer.Typer()
_EXPORT_HELP = """Write results for other tools.

\b
Examples:
  thinsection export qupath results --out for_qupath
  thinsection export trident results --out for_trident

`thinsection export TOOL --help` lists the options of a tool.
"""
exports = typer.Typer(no_args_is_help=True, help=_EXPORT_HELP)
caches = typer.Typer(
    no_args_is_help=True,
    help="List, verify and remove feature caches (features that probes store on disk).",
)
app.add_typer(exports, name="export")
app.add_typer(caches, name="cache")


@app.command("ls")
def ls(
    folder: Annotated[
        str, typer.Argument(help="Results folder, or its URL (s3://, ...).")
    ],
    as_json: AsJson = False,
) -> None:
    """List what a results folder holds: tile grids, embeddings, failed slides and commands.

    \b
    Examples:
      thinsection ls results
      thinsection ls s3://bucket/results
    """
    from thinsection.files.urls import is_url
    from thinsection.results.folder import open_results

    if is_url(folder):
        from thinsection.run.remote_out import listing_of

        with listing_of(folder) as listed:
            document = LsDocument.of(folder, open_results(listed))
    else:
        document = LsDocument.of(folder, open_results(folder))
    if as_json:
        print_document(document)
        return
    width = max([len(row.address) for row in document.results], default=0)
    print(f"{folder}: {counted(document.num_slides, 'slide')}")
    for row in document.results:
        facts = [row.encoder, row.slide_encoder]
        facts += [f"dim {dim}" for dim in (row.dim, row.slide_dim) if dim]
        size = f"{row.num_slides:>6} slides  {format_bytes(row.num_bytes):>10}"
        words = ", ".join(filter(None, facts))
        print(f"  {row.address:<{width}}  {size}  {words}".rstrip())
    for failure in document.failures:
        print(f"  failed: {failure.slide_id}: {failure.error}")
    for invocation in document.invocations:
        outcome = "not finished"
        if invocation.counts:
            outcome = count_words(invocation.counts)
        print(f"  records/{invocation.record}  {invocation.command}: {outcome}")


@app.command("view")
@with_config("thinsection.view:ViewConfig")
def view(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Slide files, folders, cohort tables (CSV), or results folders."
        ),
    ],
    config: Any = None,
) -> None:
    """Look at slides and results in the browser.

    The viewer shows slides at any zoom, the results as layers above them, and similar tiles. It
    changes no file. Open the printed address; Ctrl-C ends the viewer.

    \b
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
def efficiency(folder: FolderArgument, as_json: AsJson = False) -> None:
    """Compare the CPUs, memory and time that the last run requested with what it used.

    Prints the bottleneck and a better request for the next run, and writes a page.

    \b
    Example:
      thinsection efficiency results
    """
    from thinsection.results.records import efficiency as analyse

    analysis, page = analyse(folder)
    if as_json:
        print_document(EfficiencyDocument.of(analysis, page))
        return
    console = Console()
    table = Table("resource", "requested", "used", "share")
    for share in analysis.shares:
        part = "" if share.fraction is None else f"{share.fraction:.0%}"
        table.add_row(share.name, share.requested, share.used, part)
    console.print(table)
    for warning in analysis.warnings:
        console.print(f"warning: {warning}", style="bold red", markup=False)
    console.print(analysis.bottleneck, markup=False)
    if analysis.next_request is not None:
        console.print("ask for this next time:", markup=False)
        for line in analysis.next_request.sbatch_lines():
            console.print(f"  {line}", markup=False)
    console.print(f"page: {page}", markup=False)


def _print_and_exit(left_out: list[str], summary: str) -> None:
    """Prints the number of results and the slides left out; exit code 3 if there are any."""
    print(*left_out, summary, sep="\n")
    if left_out:
        raise typer.Exit(EXIT_SOME_LEFT_OUT)


@exports.command("anndata")
def export_anndata(
    folder: FolderArgument,
    out: Annotated[
        Path, typer.Option(help="File to write (.h5ad); with --cells a folder.")
    ],
    features: Features = None,
    cells: Cells = None,
    neighbors: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --cells: also write a graph of this many nearest cells.",
        ),
    ] = 0,
) -> None:
    """Write AnnData (.h5ad) for scanpy, squidpy and LazySlide.

    X has the tile embeddings, obsm['spatial'] the coordinates. With --cells there is a file for
    each slide, with a row for each cell, its measures, and the name of its tile.

    \b
    Examples:
      thinsection export anndata results --out results/tiles.h5ad
      thinsection export anndata results --out cells/ --cells cellvit --neighbors 6
    """
    from thinsection.exchange.anndata import export_anndata as export
    from thinsection.exchange.cells import export_cells_anndata

    left_out: list[str] = []
    if cells is not None:
        num_slides = export_cells_anndata(
            folder,
            out,
            name=cells,
            features=features,
            neighbors=neighbors,
            on_damage=left_out.append,
        )
        _print_and_exit(left_out, f"cells of {num_slides} slides are in {out}")
        return
    num_tiles = export(folder, out, features=features, on_damage=left_out.append)
    _print_and_exit(left_out, f"wrote {num_tiles} tiles to {out}")


@exports.command("spatialdata")
def export_spatialdata(
    folder: FolderArgument,
    out: Annotated[Path, typer.Option(help="Folder for the Zarr stores.")],
    features: Features = None,
    cells: Cells = None,
) -> None:
    """Write a SpatialData store (Zarr) per slide.

    Tiles and outlines become shapes, and embeddings become a table with a row for each tile. With
    --cells, the cells become shapes with a table of their own. Pixels stay in the slide's file.

    \b
    Example:
      thinsection export spatialdata results --out for_spatialdata
    """
    from thinsection.exchange.spatialdata import export_spatialdata as export

    left_out: list[str] = []
    num_slides = export(
        folder, out, features=features, cells=cells, on_left_out=left_out.append
    )
    _print_and_exit(left_out, f"{num_slides} slides are in {out}")


@exports.command("qupath")
def export_qupath(
    folder: FolderArgument,
    out: Annotated[Path, typer.Option(help="Folder for the GeoJSON files.")],
    grid: Annotated[
        str | None,
        typer.Option(help="Tile grid to use, if the folder has several."),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Column of categories that gives the class of each tile, if there are several."
        ),
    ] = None,
) -> None:
    """Write a GeoJSON file per slide for QuPath.

    Tissue outlines become annotations. Tiles become detections, with the numbers of the tile
    table as measurements.

    \b
    Examples:
      thinsection export qupath results --out for_qupath
      thinsection export qupath results --out for_qupath --classes leiden
    """
    from thinsection.exchange.qupath import SCRIPT
    from thinsection.exchange.qupath import export_qupath as export

    left_out: list[str] = []
    num_slides = export(
        folder, out, grid=grid, classes=classes, on_left_out=left_out.append
    )
    summary = (
        f"{num_slides} slides are in {out}; to import them, run {SCRIPT} in QuPath"
    )
    _print_and_exit(left_out, summary)


def _export_command(tool: str) -> Callable[..., None]:
    """Command `export TOOL` for a layout, which may come from another package."""

    def export(
        folder: FolderArgument,
        out: Annotated[
            Path,
            typer.Option(help="Folder to write."),
        ],
        features: Features = None,
        copy: Annotated[
            bool,
            typer.Option(help="Copy result files, in place of hard links to them."),
        ] = False,
    ) -> None:
        left_out: list[str] = []
        num_slides = export_peer(
            folder,
            out,
            tool,
            features=features,
            copy=copy,
            on_left_out=left_out.append,
        )
        summary = f"{num_slides} slides are in {out} as {tool} reads them"
        _print_and_exit(left_out, summary)

    return export


for _layout in LAYOUTS:
    exports.command(_layout.name, help=_layout.help)(_export_command(_layout.name))


@app.command("import")
def import_folder(
    tool: Annotated[
        str, typer.Argument(help="Tool: trident, clam, stamp or slide2vec.")
    ],
    folder: Annotated[Path, typer.Argument(help="Output folder of the tool.")],
    out: Annotated[Path, typer.Option(help="Results folder to write.")],
    slides: Annotated[
        list[str] | None,
        typer.Option(
            help="Slide files, folders or a cohort table (CSV); "
            "repeat the option for several."
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="Encoder of the features, for CLAM, whose files do not name it."
        ),
    ] = None,
) -> None:
    """Read coordinates, features and slide lists of another tool into a results folder.

    \b
    Example:
      thinsection import trident job_dir --out results --slides slides/
    """
    from thinsection.exchange.peer_import import import_peer

    left_out: list[str] = []
    num_slides = import_peer(
        folder,
        out,
        tool,
        slides=slides or (),
        encoder=encoder,
        on_left_out=left_out.append,
    )
    _print_and_exit(left_out, f"{num_slides} slides of {tool} are in {out}")


@app.command("relink")
def relink_folder(
    folder: FolderArgument,
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="NEW_PLACE...",
            help="Folders, slide files or URLs at which the slides are now.",
            show_default=False,
        ),
    ],
) -> None:
    """Find the slides of a results folder that moved, by their names and contents.

    Only the paths of the slides change. Commands that open slides again (heatmap, export jpeg,
    view) then use the new files.

    Exit code: 0 every slide has a file, 3 some are ambiguous or missing.

    \b
    Example:
      thinsection relink results /new/disk/slides
    """
    from thinsection.results.relink import relink

    relinked = relink(folder, places, on_message=print)
    for slide_id, files in relinked.ambiguous.items():
        print(f"{slide_id}: ambiguous: {', '.join(files)}")
    for slide_id in relinked.missing:
        print(f"{slide_id}: missing")
    print(
        f"{len(relinked.found)} found, {len(relinked.ambiguous)} ambiguous, "
        f"{len(relinked.missing)} missing, {len(relinked.kept)} still at their former place"
    )
    if relinked.ambiguous or relinked.missing:
        raise typer.Exit(EXIT_SOME_LEFT_OUT)


@app.command("merge")
def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Results folders, or a folder that contains results folders.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the merged results; it may exist.", show_default=False
        ),
    ],
    copy: Annotated[
        bool, typer.Option(help="Copy files, in place of hard links to them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Join results folders into one, in which each finished slide appears once.

    Files are linked, so that they need no further space. A slide that several folders have is taken
    once; if its results differ, nothing is changed and the message names it. Unfinished and failed
    slides are left out. The same command again continues. Tables and pages are made again.

    Exit code: 0 every slide is there, 2 the folders disagree, 3 some slides were left out.

    \b
    Examples:
      thinsection merge results_a results_b --out all
      thinsection merge parts/ --out all --copy
    """
    from thinsection.run.merge import merge_results

    console = message_console(as_json=as_json)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    summary = merge_results(folders, out=out, copy=copy, on_message=say)
    for slide in summary.slides:
        if slide.status == "left-out":
            say(f"{slide.slide_id}: left out of {slide.source}: {slide.reason}")
    size = format_bytes(summary.num_bytes)
    ends = count_words(summary.counts)
    say(f"{ends}; {summary.num_files} files, {size} -> {out}/index.html, summary.csv")
    if as_json:
        print_document(MergeDocument.of(summary))
    if summary.counts["left-out"]:
        raise typer.Exit(EXIT_SOME_LEFT_OUT)


@app.command("verify")
def verify(folder: FolderArgument, as_json: AsJson = False) -> None:
    """Check every result file against its checksum.

    Also shows which versions of Thinsection wrote the files. A folder of features, such as
    GRID/features_NAME, can be checked alone: its .h5 files contain their checksums.

    Exit code: 0 no file is damaged, 1 some are.

    \b
    Example:
      thinsection verify results
    """
    from thinsection.results.records import read_records, versions_of
    from thinsection.results.verify import verify as verify_folder

    checked, damaged = verify_folder(folder)
    versions = versions_of(read_records(folder))
    if as_json:
        print_document(VerifyDocument.of(folder, checked, damaged, versions))
    else:
        print(*damaged, f"{checked} checksums, {len(damaged)} damaged", sep="\n")
        if versions:
            print(
                f"written by Thinsection {' and '.join(versions)}; this is {__version__}"
            )
    if not damaged:
        return
    if not as_json:
        print(
            "remove the damaged files and run the same command again: only these are made anew"
        )
    raise typer.Exit(EXIT_DAMAGED)


@app.command("cite")
def cite(
    path: Annotated[
        Path,
        typer.Argument(
            help="Results folder; folder of train, predict --labels, probe or bench; or a model "
            "file.",
            metavar="RESULTS",
            show_default=False,
        ),
    ],
    form: Annotated[
        Literal["text", "bibtex"],
        typer.Option(
            "--format",
            help="Form of the output. text: paragraph, methods and references; bibtex: the "
            "references, and the paragraph in LaTeX as a comment.",
        ),
    ] = "text",
) -> None:
    """Print what to cite for results, and a methods paragraph.

    Numbers, versions and methods come from files in the folder, such as run.json and models.
    Facts that are not in these files are listed, for you to fill in.

    \b
    Examples:
      thinsection cite results
      thinsection cite results --format bibtex > references.bib
    """
    from thinsection.citation import cite as read_citation

    citation = read_citation(path)
    print(citation.bibtex if form == "bibtex" else citation.text)


@caches.command("ls")
def list_caches(cache_dir: CacheDir = None) -> None:
    """List the feature caches with their state, size, shape and data types."""
    from thinsection.store import cache

    root = cache_dir or cache.default_root()
    entries = cache.list_caches(root)
    for entry in entries:
        size = format_bytes(entry.data_bytes)
        print(entry.name, entry.state, size, *_cache_facts(entry), sep="  ")
    print(f"{len(entries)} caches in {root}")


def _cache_facts(entry: "CacheEntry") -> list[str]:
    """Manifest of a complete cache, or the progress of an incomplete one, or its error."""
    manifest = entry.manifest
    if manifest is None:
        if entry.state == "unfinished":
            return [f"{entry.rows_kept} rows kept; the same command continues"]
        return [str(entry.problem)]
    dtypes = [f"{count} rows {dtype}" for dtype, count in manifest.dtype_rows.items()]
    facts = [
        " x ".join(str(length) for length in manifest.shape),
        ", ".join(dtypes),
        manifest.created,
    ]
    if manifest.loss is not None:
        facts.append(f"lossy, largest error {manifest.loss.max_abs_error:.3g}")
    return facts


@caches.command("verify")
def verify_cache(name: CacheName, cache_dir: CacheDir = None) -> None:
    """Check every byte of a cache against its checksums; exit code 1 if one is damaged."""
    from thinsection.store import cache

    damaged = cache.verify_cache(cache_dir or cache.default_root(), name)
    if damaged:
        rows = ", ".join(str(row) for row in damaged[:10])
        if len(damaged) > 10:
            rows += ", ..."
        print(
            f"{name}: {len(damaged)} damaged rows ({rows}); remove it and compute it again"
        )
        raise typer.Exit(EXIT_DAMAGED)
    print(f"{name}: whole")


@caches.command("rm")
def remove_cache(name: CacheName, cache_dir: CacheDir = None) -> None:
    """Remove a cache, unless a process is writing it."""
    from thinsection.store import cache

    size = cache.remove_cache(cache_dir or cache.default_root(), name)
    print(f"{name}: removed, {format_bytes(size)} free again")
