"""Which file a slide is: what of it is compared before results that are there are taken for its.

A key holds the identity of the content, whatever it is called and wherever it lies. By default a
file is the same one while its size, 8 samples of 16 KiB and its time stamps are. Where these alone
differ (a copy, a touch) every byte is compared once, by the hash that the run before has left.
"""

import hashlib
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from thinsection.errors import StoreError
from thinsection.files.sources import FileSource, FsspecSource, RemoteFolder, is_url
from thinsection.slide.readers import is_folder_slide
from thinsection.types import MIB

How = Literal["times", "full", "samples"]
_SAMPLE_BYTES = 16 * 1024
_SAMPLES = 8
_METADATA = ("zarr.json", ".zattrs", ".zarray", ".zgroup")  # of a folder of chunks


@dataclass(frozen=True)
class Identity:
    """What is known of a slide's file."""

    source: str  # of its content, in every key
    samples: str  # `fingerprint`
    times: str  # of the last change of each of its files, ns; '' by URL
    whole: str = ""  # SHA-256 of every byte; '' where nobody has read them

    @classmethod
    def of(cls, path: Path | str, known: Mapping[str, str], how: How) -> "Identity":
        """The identity of a file or URL; `known` are the fields that an earlier run left, if any.

        `how`: 'times' as above; 'samples' never reads every byte; 'full' always does. StoreError
        where it cannot be read.
        """
        samples, times = fingerprint(path), file_times(path)
        new, same = cls(samples, samples, times), known.get("samples") == samples
        if how != "full" and not same:
            return new
        if how == "samples" or (how == "times" and known.get("times") == times):
            return cls(**known)
        whole = whole_sum(path)
        if not same:
            return replace(new, whole=whole)
        if known.get("whole") in ("", whole):  # '': no tile of it was read so far
            return replace(cls(**known), times=times, whole=whole)
        return replace(new, source=f"{samples}-{whole[:24]}", whole=whole)


class WholeSum:
    """`whole_sum` of a local file, computed in a thread while its tiles are read."""

    def __init__(self, path: str) -> None:
        self._path, self._found = path, ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> str:
        """The hash; '' where a byte that no tile needs cannot be read."""
        self._thread.join()
        return self._found

    def _run(self) -> None:
        with suppress(StoreError):
            self._found = whole_sum(self._path)


def whole_sum(path: Path | str) -> str:
    """SHA-256 of all bytes of a slide and its files, or a StoreError. Memory: 8 MiB."""
    digest = hashlib.sha256()
    for one in _files(path):
        try:
            with closing(_source(one)) as source:
                size = _size(source, one)
                for start in range(0, size, 8 * MIB):
                    digest.update(source.read_at(start, min(8 * MIB, size - start)))
        except OSError as error:
            raise _unreadable(one, error) from None
    return digest.hexdigest()


def file_times(path: Path | str) -> str:
    """A hash of the time stamps of a slide's files; '' by URL, or where one is not there."""
    if is_url(str(path)):
        return ""
    with suppress(FileNotFoundError):
        stamps = [one.stat().st_mtime_ns for one in map(Path, _files(path))]
        return hashlib.sha256(repr(stamps).encode()).hexdigest()[:24]
    return ""


def _source(path: Path | str) -> FileSource | FsspecSource:
    return FsspecSource(str(path)) if is_url(str(path)) else FileSource(str(path))


def _size(source: FileSource | FsspecSource, path: Path | str) -> int:
    return (
        source.size if isinstance(source, FsspecSource) else Path(path).stat().st_size
    )


def _unreadable(path: Path | str, error: OSError) -> StoreError:
    where = "" if is_url(str(path)) else f" in {str(path)!r}"
    return StoreError(f"slide must be readable, got {error}{where}")


def file_sum(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal. Memory: 256 KiB."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(path: Path | str) -> str:
    """Its size and a hash of 8 samples of 16 KiB spread over it, not its name nor time stamp.

    Files beside it that belong to it (`a/` for `a.mrxs`, other .dcm files) count by name and size.
    Those of a folder do too; samples are of its metadata and of 8 files spread over it.
    StoreError where it cannot be read. Memory: one sample, and 200 bytes per file of a folder.
    """
    digest = hashlib.sha256()
    try:
        files = _files(path)
        folder = _folder_sizes(path)
        for one in [path] if folder is None else _spread(files):
            _add_samples(digest, one, _SAMPLES if folder is None else 1)
        beside = {one.name: one.stat().st_size for one in _companions(path)}
        for name, size in (beside if folder is None else folder).items():
            digest.update(f"{name}:{size}".encode())
    except StoreError:  # says all
        raise
    except OSError as error:  # SlideOpenError and SlideReadError are
        raise _unreadable(path, error) from None
    return digest.hexdigest()[:24]


def _add_samples(digest: Any, path: Path | str, count: int) -> None:
    with closing(_source(path)) as source:
        size = _size(source, path)
        digest.update(str(size).encode())
        for index in range(count):
            start = max(0, (size - _SAMPLE_BYTES) * index // max(1, count - 1))
            digest.update(source.read_at(start, min(_SAMPLE_BYTES, size - start)))


def _spread(files: list[Path | str]) -> list[Path | str]:
    """Of a folder's files those whose bytes are looked at: metadata, and some of the others."""
    told = [one for one in files if Path(one).name in _METADATA]
    rest = [one for one in files if Path(one).name not in _METADATA]
    places = {index * (len(rest) - 1) // (_SAMPLES - 1) for index in range(_SAMPLES)}
    return [*told, *(rest[place] for place in sorted(places) if rest)]


def fingerprint_reads(size: int) -> tuple[int, int]:
    """(bytes, requests) that the fingerprint of a file of so many bytes takes."""
    return _SAMPLES * min(_SAMPLE_BYTES, size), _SAMPLES


def _files(slide: Path | str) -> list[Path | str]:
    """Every file of a slide: itself and its companions, or those of its folder."""
    if (sizes := _folder_sizes(slide)) is None:
        return [slide, *_companions(slide)]
    return [f"{str(slide).rstrip('/')}/{name}" for name in sizes]


def _folder_sizes(slide: Path | str) -> dict[str, int] | None:
    """Bytes of the files of a slide that is a folder, by relative name; None of a file."""
    if not is_folder_slide(slide):
        return None
    if is_url(str(slide)):
        try:
            if not (found := RemoteFolder(str(slide)).sizes()):
                raise FileNotFoundError("none")
        except (OSError, TypeError) as error:  # TypeError: a server that tells no sizes
            rule = (
                f"files of a slide by URL must be listed by its server, got {error!r}"
            )
            raise StoreError(
                f"{rule} for {str(slide)!r}; copy it here, or use s3://"
            ) from None
    else:
        files = (path for path in Path(slide).rglob("*") if path.is_file())
        found = {str(path.relative_to(slide)): path.stat().st_size for path in files}
    return dict(sorted(found.items()))


def _companions(slide: Path | str) -> list[Path]:
    """Files beside a local slide that belong to it."""
    path = Path(slide)
    suffix, folder = (
        "" if is_url(str(slide)) else path.suffix.lower(),
        path.with_suffix(""),
    )
    if suffix == ".mrxs" and folder.is_dir():
        return sorted(p for p in folder.iterdir() if p.is_file())
    return (
        sorted(p for p in path.parent.glob("*.dcm") if p != path)
        if suffix == ".dcm"
        else []
    )
