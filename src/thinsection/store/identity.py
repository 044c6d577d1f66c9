"""Identity of a slide's file: decides whether stored results belong to the file.

A stage's key contains the identity of the content, which does not depend on the file's name and
place. By default a file counts as unchanged while its size, 8 samples of 16 KiB and its time stamps
are the same. If only the time stamps differ (a copy, a touch), every byte is read once and compared
with the hash that the earlier run recorded.
"""

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from thinsection.errors import StoreError
from thinsection.files.sources import FileSource, FsspecSource, RemoteFolder
from thinsection.files.urls import is_url, without_secrets
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.cohort_table import FingerprintMode
from thinsection.slide.opening import FOLDER_METADATA, companions
from thinsection.slide.readers import is_folder_slide
from thinsection.store.ledger import stage_key
from thinsection.types import MIB, Document

_SAMPLE_BYTES = 16 * 1024
_SAMPLES = 8
_READ_BYTES = 8 * MIB


@dataclass(frozen=True)
class Identity:
    """Identity of a slide's file, recorded by an earlier run or computed now."""

    source: str  # identity of its content, a part of every key
    samples: str  # result of `fingerprint`
    times: str  # hash of the time stamps of its files; '' by URL
    whole: str = ""  # SHA-256 of all bytes; '' if they were not all read

    @classmethod
    def read(
        cls, path: Path | str, recorded: Mapping[str, str], mode: FingerprintMode
    ) -> "Identity":
        """Reads the identity of a file or URL.

        Args:
            path: path or URL of the slide.
            recorded: fields of the `Identity` that an earlier run recorded; may be empty.
            mode: 'times' compares as described at the head of this file; 'samples' never reads
                every byte; 'full' always reads every byte.

        Raises:
            StoreError: the file cannot be read.
        """
        # read before the content, so that the time stamps show a change in the meantime
        times = file_times(path)
        samples = fingerprint(path)
        new = cls(source=samples, samples=samples, times=times)
        is_complete = {"source", "samples"} <= recorded.keys()
        same_samples = is_complete and recorded["samples"] == samples
        if not same_samples:
            if mode == "full":
                return replace(new, whole=whole_sum(path))
            return new
        same_times = recorded.get("times") == times
        if mode == "samples" or (mode == "times" and same_times):
            return replace(new, **recorded)
        whole = whole_sum(path)
        # '' is recorded if no tile of the slide was read so far
        if recorded.get("whole") in ("", whole):
            return replace(new, source=recorded["source"], whole=whole)
        return replace(new, source=f"{samples}-{whole[:24]}", whole=whole)


class WholeFileHash:
    """Computes `whole_sum` of a local file in a thread, while its tiles are read."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sum = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> str:
        """Waits for the hash; '' if a byte that no tile needs cannot be read."""
        self._thread.join()
        return self._sum

    def _run(self) -> None:
        with suppress(StoreError):
            self._sum = whole_sum(self._path)


def whole_sum(path: Path | str) -> str:
    """SHA-256 of all bytes of a slide and its files.

    Memory: 8 MiB.

    Raises:
        StoreError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in _list_files(path):
        try:
            with _opened(file) as (source, size):
                for start in range(0, size, _READ_BYTES):
                    digest.update(source.read_at(start, min(_READ_BYTES, size - start)))
        except OSError as error:
            raise _unreadable(file, error) from None
    return digest.hexdigest()


def file_times(path: Path | str) -> str:
    """Hash of the time stamps of a slide's files; '' by URL, or if a file is missing."""
    if is_url(str(path)):
        return ""
    try:
        stamps = [Path(file).stat().st_mtime_ns for file in _list_files(path)]
    except FileNotFoundError:
        return ""
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:24]


@contextmanager
def _opened(path: Path | str) -> Iterator[tuple[FileSource | FsspecSource, int]]:
    """The file or URL opened, and its size in bytes."""
    if is_url(str(path)):
        with closing(FsspecSource(str(path))) as remote:
            yield remote, remote.size
    else:
        with closing(FileSource(str(path))) as local:
            yield local, Path(path).stat().st_size


def _unreadable(path: Path | str, error: OSError) -> StoreError:
    local = not is_url(str(path))
    if local and isinstance(error, FileNotFoundError):
        return StoreError(
            f"slide must be an existing file, got {str(path)!r}; check its path"
        )
    place = f" in {str(path)!r}" if local else ""
    return StoreError(f"slide must be readable, got {error}{place}")


def file_sum(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal.

    Memory: 256 KiB.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(path: Path | str) -> str:
    """Hash of a slide's size and of 8 samples of 16 KiB spread over it.

    The name and the time stamps of the slide do not count. Files beside it that belong to it (`a/`
    for `a.mrxs`, other .dcm files of its series) count by name and size. If the slide is a folder,
    its files count by name and size, and samples are taken from its metadata and from 8 files that
    are spread over it.

    Memory: one sample, and 200 bytes per file of a folder.

    Raises:
        StoreError: the slide cannot be read.
    """
    digest = hashlib.sha256()
    try:
        sizes = _folder_sizes(path)
        if sizes is None:
            _add_samples(digest, path, _SAMPLES)
            sizes = {file.name: file.stat().st_size for file in _companions(path)}
        else:
            for file in _sampled_files(_files_of_folder(path, sizes)):
                _add_samples(digest, file, 1)
        for name, size in sizes.items():
            digest.update(f"{name}:{size}".encode())
    except StoreError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from None
    return digest.hexdigest()[:24]


def _add_samples(digest: "hashlib._Hash", path: Path | str, count: int) -> None:
    with _opened(path) as (source, size):
        digest.update(str(size).encode())
        for index in range(count):
            start = max(0, (size - _SAMPLE_BYTES) * index // max(1, count - 1))
            digest.update(source.read_at(start, min(_SAMPLE_BYTES, size - start)))


def _sampled_files(files: list[str]) -> list[str]:
    """Metadata of a folder, and some of its other files, spread over it."""
    metadata = [file for file in files if Path(file).name in FOLDER_METADATA]
    chunks = [file for file in files if Path(file).name not in FOLDER_METADATA]
    if not chunks:
        return metadata
    last = len(chunks) - 1
    places = {index * last // (_SAMPLES - 1) for index in range(_SAMPLES)}
    return metadata + [chunks[place] for place in sorted(places)]


def fingerprint_reads(size: int) -> tuple[int, int]:
    """Number of bytes and of requests that the fingerprint of a file with `size` bytes takes."""
    return _SAMPLES * min(_SAMPLE_BYTES, size), _SAMPLES


def _list_files(slide: Path | str) -> list[Path | str]:
    """All files of a slide: the slide and its companions, or the files of its folder."""
    sizes = _folder_sizes(slide)
    if sizes is None:
        return [slide, *_companions(slide)]
    return [*_files_of_folder(slide, sizes)]


def _files_of_folder(slide: Path | str, sizes: Mapping[str, int]) -> list[str]:
    return [f"{str(slide).rstrip('/')}/{name}" for name in sizes]


def _folder_sizes(slide: Path | str) -> dict[str, int] | None:
    """Bytes of the files of a slide that is a folder, by relative name; None for a file."""
    if not is_folder_slide(slide):
        return None
    if is_url(str(slide)):
        sizes = _remote_sizes(str(slide))
    else:
        sizes = {}
        for path in Path(slide).rglob("*"):
            if path.is_file():
                sizes[str(path.relative_to(slide))] = path.stat().st_size
    return dict(sorted(sizes.items()))


def _remote_sizes(url: str) -> dict[str, int]:
    try:
        sizes = RemoteFolder(url).sizes()
        if not sizes:
            raise FileNotFoundError("none")
    except (OSError, TypeError) as error:
        # TypeError: the server does not state sizes
        raise StoreError(
            f"the server must list the files of a slide by URL, got "
            f"{without_secrets(repr(error))} for {url!r}; copy "
            "the slide here, or use s3://"
        ) from None
    return dict(sizes)


def _companions(slide: Path | str) -> list[Path]:
    """Files beside a local slide that belong to it."""
    if is_url(str(slide)):
        return []
    return companions(Path(slide))


@dataclass(frozen=True, kw_only=True)
class Source:
    """Identity of a slide's pixels, and hashes of its annotations."""

    key: str
    # hash of the annotation of each setting: 'tissue', 'roi', 'qc_edits'
    annotation_hashes: Mapping[str, str] = field(default_factory=dict)


def source_key(
    content: str,
    entry: SlideEntry,
    annotation_hashes: Mapping[str, str] | None = None,
) -> Source:
    """Identity of a slide's pixels: its file, and the image, resolution and channels set for it.

    Args:
        content: identity of its file.
        entry: row of the cohort.
        annotation_hashes: hash of the annotation of each setting.
    """
    chosen: Document = {}
    if entry.look is not None:
        chosen["look"] = asdict(entry.look)
    if entry.image is not None:
        chosen["image"] = entry.image
    key = stage_key(slide=content, mpp=entry.slide_mpp, **chosen)
    return Source(key=key, annotation_hashes=annotation_hashes or {})
