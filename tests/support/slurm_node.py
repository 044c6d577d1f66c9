"""A real Slurm of one node in a folder: munged, slurmctld and slurmd without systemd, as root.

    with slurm_node() as environment:
        subprocess.run(["sbatch", ...], env=environment)

A job that takes more memory than it asked for is killed within about a second. Accounting is off.

Needs Debian's packages slurm-wlm and munge: see `tests/support/debian.py`.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.debian import missing

from thinsection.machine import cpu_count

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
_START_S = 30.0
_CONFIG = """\
ClusterName=thinsection
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ctld_port}
SlurmdPort={d_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.txt
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=localhost CPUs={cpus} RealMemory={memory_mb} State=UNKNOWN
PartitionName=main Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why Slurm cannot be started here, or None."""
    if os.geteuid() != 0:
        return "slurm's daemons need root here"
    gone = missing(_PROGRAMS)
    return f"no {', '.join(gone)}; apt-get install slurm-wlm munge" if gone else None


@contextmanager
def slurm_node(
    *, cpus: int | None = None, memory_mb: int = 4000
) -> Iterator[dict[str, str]]:
    """Starts the three daemons in a temporary folder, and ends them on exit.

    Yields:
        The environment in which sbatch and its siblings find this Slurm.

    Raises:
        RuntimeError: the node did not come up; with the end of its logs.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        folder.chmod(0o711)  # munged, another user, must reach its own folder
        config = folder / "slurm.conf"
        ctld_port, d_port = _free_ports()
        text = _CONFIG.format(
            folder=folder,
            ctld_port=ctld_port,
            d_port=d_port,
            cpus=cpus or cpu_count(),
            memory_mb=memory_mb,
        )
        config.write_text(text)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        environment = {**os.environ, "SLURM_CONF": str(config)}
        _start_munge(folder)
        stack.callback(_end, folder / "munge" / "pid")
        subprocess.run(["slurmctld"], env=environment, check=True)
        stack.callback(_end, folder / "slurmctld.pid")
        subprocess.run(["slurmd", "-N", "localhost"], env=environment, check=True)
        stack.callback(_end, folder / "slurmd.pid")
        _await_idle(environment, folder)
        try:
            yield environment
        finally:
            subprocess.run(["scancel", "--user=root"], env=environment, check=False)
            _await_empty(environment)


def _start_munge(folder: Path) -> None:
    munge = folder / "munge"
    munge.mkdir(mode=0o755)
    key = munge / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    for path in (munge, key):
        shutil.chown(path, "munge", "munge")
    flags = {
        "key-file": "key",
        "socket": "socket",
        "pid-file": "pid",
        "log-file": "log",
    }
    flags["seed-file"] = "seed"
    command = ["munged", *(f"--{flag}={munge / name}" for flag, name in flags.items())]
    subprocess.run(command, user="munge", group="munge", extra_groups=[], check=True)


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("localhost", 0))
        second.bind(("localhost", 0))
        return first.getsockname()[1], second.getsockname()[1]


def _await_idle(environment: dict[str, str], folder: Path) -> None:
    command = ["sinfo", "--noheader", "--format=%t"]
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        found = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if found.stdout.strip() == "idle":
            return
        time.sleep(0.1)
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
    raise RuntimeError(f"slurm must come up within {_START_S:.0f} s, got:\n{logs}")


def _await_empty(environment: dict[str, str]) -> None:
    """Jobs that were cancelled take a moment to die; their files lie in the caller's folders."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        listed = subprocess.run(
            ["squeue", "--noheader"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not listed.stdout.strip():
            return
        time.sleep(0.1)


def _end(pid_file: Path) -> None:
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        return  # it ended by itself
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
