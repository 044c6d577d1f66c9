"""A folder of an object store, or of another fsspec file system, that results are put into."""

from pathlib import Path

from thinsection.errors import StoreError
from thinsection.files.atomic import TMP_MARK, atomic_path
from thinsection.files.sources import URL_MARK, filesystem

# a put of these stores is seen whole or not at all; elsewhere a temporary name is moved into place
_WHOLE_PUTS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"))


class RemoteFolder:
    """Files by relative name under the URL of a folder, which need not exist.

    Object stores have no lock that holds: one process at a time may put files here.

    Raises:
        MissingDependencyError: fsspec or the protocol's own package is not installed.
        SlideOpenError: unknown protocol.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, path = filesystem(self.url)
        self._root = path.rstrip("/")
        self._whole = url.partition(URL_MARK)[0] in _WHOLE_PUTS

    def check(self) -> None:
        """Proves that files can be put and deleted.

        Raises:
            StoreError: they cannot; with the store's own words.
        """
        path = f"{self._root}/{TMP_MARK}writable"
        try:
            self._make_parent(path)
            self._fs.pipe_file(path, b"\0")
            self._fs.rm_file(path)
        except Exception as error:  # each store has its own errors, credentials' among them
            raise StoreError(f"out must be writable, got {error!r} for {self.url!r}") from error

    def sizes(self) -> dict[str, int]:
        """Relative name -> bytes of every file.

        Memory: about 200 bytes per file.
        """
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        return {path[start:]: int(entry["size"]) for path, entry in found.items()}

    def read(self, name: str) -> bytes:
        """The bytes of a small file."""
        data: bytes = self._fs.cat_file(f"{self._root}/{name}")
        return data

    def get(self, name: str, local: Path) -> None:
        """Copies a file here, whole."""
        with atomic_path(local) as tmp:
            self._fs.get_file(f"{self._root}/{name}", str(tmp))

    def put(self, local: Path, name: str) -> None:
        """Copies a file there; under its name it is whole or as it was before."""
        target = f"{self._root}/{name}"
        self._make_parent(target)
        if self._whole:
            self._fs.put_file(str(local), target)
            return
        folder, _, last = target.rpartition("/")
        unfinished = f"{folder}/{TMP_MARK}{last}"
        self._fs.put_file(str(local), unfinished)
        self._fs.mv(unfinished, target)

    def delete(self, name: str) -> None:
        """Removes a file that is there."""
        self._fs.rm_file(f"{self._root}/{name}")

    def _make_parent(self, path: str) -> None:
        if not self._whole:  # object stores have no folders
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
