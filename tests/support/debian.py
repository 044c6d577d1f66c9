"""Debian's packages that some tests need, which THINSECTION_INSTALL_SLURM=1 installs beforehand."""

import os
import shutil
import subprocess
import sys

_PROGRAMS = {"slurmctld": "slurm-wlm", "munged": "munge", "chromium": "chromium"}
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def install() -> None:
    """Installs what is missing, as root; what cannot be had is said, and its tests are skipped."""
    packages = [name for what, name in _PROGRAMS.items() if not shutil.which(what, path=_PATH)]
    if not packages or os.geteuid() != 0:
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wanted = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    for command in (["apt-get", "update"], wanted):
        try:
            subprocess.run(command, env=quiet, capture_output=True, timeout=600, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or b""
            sys.stderr.write(f"{error}\n{said.decode(errors='replace')[-300:]}\n")
            return
