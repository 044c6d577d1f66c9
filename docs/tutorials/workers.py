# %% [markdown]
# # Several workers, and a cluster
# The same command runs on one process, on several, under Dask or Ray, or as a Slurm job array. The bytes of the results
# are the same.

# %%
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from thinsection.testing.synthetic import write_he_slide

folder = Path(tempfile.mkdtemp())
slides = folder / "slides"
slides.mkdir()
for number in range(4):
    write_he_slide(slides / f"s{number}.svs", (3000, 2500), seed=number, mpp=0.5)


def thinsection(*words: object) -> str:
    """A command, as in the shell."""
    command = [sys.executable, "-m", "thinsection", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# %% [markdown]
# ## What will it take?
# From headers and thumbnails, with this machine's rates, before anything runs.

# %%
print(thinsection("plan", slides))

# %% [markdown]
# ## One process, then two
# `--executor pool` starts processes on this machine; `dask`, `ray` and `slurm` are the other words.

# %%
run = ("run", slides, "--threads", "1")
thinsection(*run, "--out", folder / "one")
thinsection(*run, "--out", folder / "two", "--executor", "pool", "--workers", "2")


def digests(out: Path) -> dict[str, str]:
    """Of every file of embeddings."""
    files = sorted(out.glob("*/features_*/*.h5"))
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest()[:12] for f in files}


assert digests(folder / "one") == digests(folder / "two")
digests(folder / "two")

# %% [markdown]
# ## A Slurm array
# `thinsection slurm submit` queues it; `slurm script` only writes it, to look at. Memory and time come from the plan.

# %%
thinsection("slurm", "script", slides, "--out", folder / "array", "--partition", "cpu")
script = next((folder / "array").rglob("array.sh"))
print(
    "\n".join(line for line in script.read_text().splitlines() if line.startswith("#"))
)
