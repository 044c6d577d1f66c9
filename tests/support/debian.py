"""Debian's packages that some tests need, which THINSECTION_INSTALL_SLURM=1 installs beforehand."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

_PROGRAMS = {"slurmctld": "slurm-wlm", "munged": "munge", "chromium": "chromium"}


def missing(programs: Iterable[str]) -> list[str]:
    """Those that are not there; daemons lie where root's PATH looks."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [name for name in programs if shutil.which(name, path=path) is None]


def install() -> None:
    """Installs what is missing, as root; what cannot be had is said, and its tests are skipped."""
    packages = [_PROGRAMS[name] for name in missing(_PROGRAMS)]
    if not packages or os.geteuid() != 0:
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wanted = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    for command in (["apt-get", "update"], wanted):
        try:
            subprocess.run(
                command, env=quiet, capture_output=True, timeout=600, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or b""
            sys.stderr.write(f"{error}\n{said.decode(errors='replace')[-300:]}\n")
            return
