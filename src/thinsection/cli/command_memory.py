"""Peak memory of the commands that read stored embeddings, by formulas.

N tiles of the largest slide, T tiles of all slides, D channels of b bytes each; P bytes of a
process that has loaded PyTorch (measured once per machine), C of one that has not:

    import           C + 12 MiB + blocks + 64 N           blocks = min(24 MiB, 4 N D)
    export trident   C + blocks + 16 N
    export stamp     C + blocks + 16 N
    export qupath    C + 250 N
    export anndata   C + 112 MiB + 6 MiB + 300 T          pandas and anndata
    export clam      P + 4 N D                            a tensor is written whole
    export slide2vec P + 4 N D
    aggregate        C + 8 D min(N, 8192)                 mean and max
    predict          P + 16 D min(N, 4096)                all heads but these two:
                     P + 4 N D                            transmil, transformer; their own memory is
                                                          not counted
    heatmap          predict + 165 MiB                    pictures
    train            P + 96 MiB + 36 D min(N, 4096) + bags that --memory keeps; transmil and
                     transformer hold whole bags, and --bag-size 0 too: 36 D N
    view             P + 14 MiB + min(a quarter of --memory without 320 MiB, 12 N D), for one slide

With --workers each process has this peak, beside a first process of P (predict, heatmap, train) or
96 MiB. `plan` adds the margin of `run.cost`. `benchmarks/bench_memory.py` compares the plan with
the peak that it measures; the constants were fitted there.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinsection.config import nearest
from thinsection.errors import ConfigError, DatasetError, InvalidInputError, StoreError
from thinsection.evaluation.embeddings import (
    EMBEDDING_SUFFIXES,
    feature_files,
    open_embeddings,
)
from thinsection.pool.encoder import BLOCK_ROWS as POOLED_ROWS
from thinsection.predict.config import BAGS_AT_WORK, FitConfig, FoldsConfig
from thinsection.predict.heads.config import BLOCK_HEADS, BLOCK_ROWS
from thinsection.run.cost import PLAIN_PROCESS_BYTES, MemoryPlan
from thinsection.types import MIB, parse_bytes
from thinsection.view.pixels import PICTURE_BYTES
from thinsection.view.shown import ViewerConfig, layer_bytes

# interpreter, NumPy, h5py and the command line
COMMAND_BYTES = 70 * MIB
# blocks of embeddings that are checked and copied: three of 8 MiB
_BLOCKS_BYTES = 24 * MIB
_COHORT_BYTES = 12 * MIB  # readers of slides, of which `import` takes sizes
_TABLES_BYTES = 118 * MIB  # pandas, anndata, and a block of embeddings
_PICTURES_BYTES = (
    165 * MIB
)  # a slide's picture, its overlays, and the libraries for them
_TRAINING_BYTES = 96 * MIB  # scores, pictures and the page of an experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSize:
    """Embeddings of a folder: the numbers that decide the memory of commands that read them."""

    num_tiles: tuple[int, ...]  # of each slide
    dim: int
    item_bytes: int  # bytes of a stored value

    @property
    def most_tiles(self) -> int:
        """Tiles of the largest slide."""
        return max(self.num_tiles)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest slide in float32."""
        return 4 * self.most_tiles * self.dim

    def rows_bytes(self, num_rows: int, value_bytes: int) -> int:
        """Bytes of a block of the largest slide."""
        return value_bytes * self.dim * min(num_rows, self.most_tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCommand:
    """Command with its folder and settings."""

    size: StoredSize
    memory: str | None  # value of --memory; None: the default of the command
    head: str  # head of the model; '' if the command has none

    def limit(self, default: str) -> int:
        """Bytes of --memory."""
        return parse_bytes(self.memory or default)


Parts = dict[str, int]


def _blocks(command: PlannedCommand) -> Parts:
    blocks = min(_BLOCKS_BYTES, command.size.largest_bytes)
    return {"blocks of embeddings": blocks, "tiles": 16 * command.size.most_tiles}


def _import(command: PlannedCommand) -> Parts:
    blocks = min(_BLOCKS_BYTES, command.size.largest_bytes)
    return {
        "cohort": _COHORT_BYTES,
        "blocks of embeddings": blocks,
        "tiles": 64 * command.size.most_tiles,
    }


def _qupath(command: PlannedCommand) -> Parts:
    return {"tiles": 250 * command.size.most_tiles}


def _anndata(command: PlannedCommand) -> Parts:
    return {"tables": _TABLES_BYTES, "tiles": 300 * sum(command.size.num_tiles)}


def _tensor(command: PlannedCommand) -> Parts:
    return {"largest slide": command.size.largest_bytes}


def _aggregate(command: PlannedCommand) -> Parts:
    return {"block of embeddings": command.size.rows_bytes(POOLED_ROWS, 8)}


def _predict(command: PlannedCommand) -> Parts:
    if command.head in BLOCK_HEADS:
        return {"blocks of embeddings": command.size.rows_bytes(BLOCK_ROWS, 16)}
    return {"largest slide": command.size.largest_bytes}


def _heatmap(command: PlannedCommand) -> Parts:
    return {**_predict(command), "pictures": _PICTURES_BYTES}


def _train(command: PlannedCommand) -> Parts:
    size = command.size
    # drawn tiles and blocks; transmil, transformer and all tiles of a case in each epoch take more
    num_rows = min(size.most_tiles, max(FitConfig().bag_size, BLOCK_ROWS))
    at_work = BAGS_AT_WORK * 4 * size.dim * num_rows  # tiles become float32
    stored = size.item_bytes * size.dim * sum(size.num_tiles)
    limit = command.limit(FoldsConfig().memory)
    # the process itself is part of the limit
    kept = min(stored, max(0, limit - COMMAND_BYTES - _TRAINING_BYTES - at_work))
    return {
        "scores and page": _TRAINING_BYTES,
        "bags at work": at_work,
        "bags kept": kept,
    }


def _view(command: PlannedCommand) -> Parts:
    size = command.size
    limit = layer_bytes(command.limit(ViewerConfig().memory))
    layers = min(limit, 12 * size.dim * size.most_tiles)
    return {"layers and searches": layers, "pictures": PICTURE_BYTES}


# command -> its formula, and whether it loads PyTorch
_COMMANDS: dict[str, tuple[Callable[[PlannedCommand], Parts], bool]] = {
    "import": (_import, False),
    "export trident": (_blocks, False),
    "export stamp": (_blocks, False),
    "export qupath": (_qupath, False),
    "export anndata": (_anndata, False),
    "export clam": (_tensor, True),
    "export slide2vec": (_tensor, True),
    "aggregate": (_aggregate, False),
    "predict": (_predict, True),
    "heatmap": (_heatmap, True),
    "train": (_train, True),
    "view": (_view, True),
}
COMMANDS = tuple(_COMMANDS)
_WITH_MODEL = ("predict", "heatmap")
# commands whose first process loads PyTorch too
_FIRST_LOADS_TORCH = ("predict", "heatmap", "train")
# commands whose slides several processes share with --workers
_IN_WORKERS = ("aggregate", "predict", "heatmap", "train")


def check_command(command: str) -> None:
    """Raises ConfigError: `plan` does not know the command."""
    if command not in _COMMANDS:
        raise ConfigError(
            f"command must be run or one of {', '.join(COMMANDS)}, got {command!r}"
            f"{nearest(command, COMMANDS)}"
        )


def loads_torch(command: str) -> bool:
    """True if the command imports PyTorch."""
    return _COMMANDS[command][1]


def is_in_workers(command: str) -> bool:
    """True if several processes share the slides of the command with --workers."""
    return command in _IN_WORKERS


def command_memory(
    command: str,
    paths: Sequence[str],
    *,
    memory: str | None = None,
    workers: int = 1,
    process_bytes: Callable[[], int],
) -> tuple[StoredSize, MemoryPlan]:
    """Stored embeddings of a folder, and the peak memory of a command that reads them.

    Args:
        command: a name in `COMMANDS`.
        paths: the folder; for 'predict' and 'heatmap' the model before it.
        memory: value of the command's --memory; None: its default.
        workers: number of processes, for commands with --workers.
        process_bytes: measures a process that has loaded PyTorch, if the command loads it.

    Raises:
        ConfigError: another command, or not the paths that it takes.
        StoreError: no embeddings in the folder.
    """
    check_command(command)
    has_model = command in _WITH_MODEL
    if len(paths) != 1 + has_model:
        rule = "a model and a folder" if has_model else "one folder"
        raise ConfigError(f"slides must be {rule} for {command}, got {list(paths)}")
    head = ""
    if has_model:
        from thinsection.predict.model_file import read_card

        head = read_card(Path(paths[0])).head.head
    size = stored_size(Path(paths[-1]))
    formula, _ = _COMMANDS[command]
    parts = formula(PlannedCommand(size=size, memory=memory, head=head))
    process = process_bytes() if loads_torch(command) else COMMAND_BYTES
    plan = MemoryPlan(host={"process": process, **parts})
    if command not in _IN_WORKERS:
        return size, plan
    first_bytes = process if command in _FIRST_LOADS_TORCH else PLAIN_PROCESS_BYTES
    return size, plan.of_workers(workers, first_bytes=first_bytes)


def stored_size(folder: Path) -> StoredSize:
    """Sizes of the embeddings in a folder of results or of another tool, from their headers.

    Raises StoreError: no embeddings.
    """
    try:
        files = [*feature_files(folder).files.values()]
    except (DatasetError, InvalidInputError):
        # another layout, or several encoders: all files count
        files = []
    if not files:
        files = sorted(
            path for path in folder.rglob("*") if path.suffix in EMBEDDING_SUFFIXES
        )
    sizes = []
    for path in files:
        # coordinates without embeddings
        with suppress(StoreError, KeyError):
            rows = open_embeddings(path)
            sizes.append((len(rows), rows.shape[1], rows.dtype.itemsize))
    if not sizes:
        raise StoreError(f"folder must contain embeddings, got none in {str(folder)!r}")
    return StoredSize(
        num_tiles=tuple(count for count, _, _ in sizes),
        dim=max(dim for _, dim, _ in sizes),
        item_bytes=max(item_bytes for _, _, item_bytes in sizes),
    )
