"""Build hook of hatchling: puts OpenSeadragon (BSD-3) where the viewer has its files.

Every build runs it: a wheel, an sdist, `pip install .` of a clone, `pip install -e .`. The library comes
from npm's registry and is checked by its hash; a build without it fails. An sdist holds the files, so
a wheel that is made of one needs no network.
"""

import hashlib
import io
import os
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
REGISTRY = "https://registry.npmjs.org"
# npm's own variable for a mirror
REGISTRY_VARIABLE = "npm_config_registry"
TIMEOUT_S = 60.0


class OpenSeadragonHook(BuildHookInterface[Any]):
    """Fetches the viewer's library before each build, unless it is there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Puts the files into the source tree, where the build finds them."""
        put_files(Path(self.root, STATIC))


def put_files(folder: Path) -> None:
    """Writes the files to a folder; does nothing where they are there."""
    if all((folder / name).is_file() for name in FILES):
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
    registry = os.environ.get(REGISTRY_VARIABLE, REGISTRY).rstrip("/")
    url = f"{registry}/openseadragon/-/openseadragon-{VERSION}.tgz"
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
