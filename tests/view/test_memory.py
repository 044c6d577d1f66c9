"""The viewer's process stays within --memory, whatever it is asked for."""

import http.client
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from tests.view.conftest import B

from thinsection.results.folder import Results
from thinsection.store.ledger import load_ledger
from thinsection.store.tiles_h5 import TilesWriter
from thinsection.types import MIB

pytestmark = pytest.mark.check  # a server in a process of its own

TILES, DIM = 40_000, 1280  # 205 MB of embeddings


def note_in_ledger(results: Path, features: str) -> None:
    """Lets the ledger of the slide list the larger file that replaced its embeddings."""
    ledger = load_ledger(results, B)
    name = f"{features}/{B}.h5"
    tiles = f"{features.split('/', maxsplit=1)[0]}/tiles"
    size = (results / name).stat().st_size
    record = ledger.stages[features]
    larger = replace(
        record, files={**record.files, name: size}, facts={**record.facts, "dim": DIM}
    )
    grid = ledger.stages[tiles]
    more = replace(grid, facts={**grid.facts, "num_tiles": TILES})
    ledger.with_stage(features, larger).with_stage(tiles, more).save()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("clients", [1, 16])
def test_memory_holds_the_process_with_tiles_layers_and_a_search(
    view_results: Results, tmp_path: Path, clients: int
) -> None:
    (features,) = view_results.features
    shutil.copytree(view_results.folder, tmp_path / "r")
    rng = np.random.default_rng(3)
    corners = np.stack(np.divmod(np.arange(TILES, dtype=np.int64), 200), axis=1) * 256
    with TilesWriter(
        tmp_path / "r" / features / f"{B}.h5", dim=DIM, attributes={}
    ) as writer:
        for rows in np.array_split(corners, 40):
            writer.append(rows, rng.normal(size=(len(rows), DIM)).astype(np.float32))
    note_in_ledger(tmp_path / "r", features)
    command = [sys.executable, "-m", "thinsection", "view", str(tmp_path / "r")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    process = subprocess.Popen(
        [*command, "--memory", "512MiB"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.startswith("http://127.0.0.1:"), line
        at = urlsplit(line)
        address = (at.hostname or "", at.port)

        def get(connection: http.client.HTTPConnection, path: str) -> bytes:
            connection.request("GET", f"{at.path}slides/{B}{path}")
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status == 200, data
            return data

        def ask(client: int) -> None:
            """Asks for all layers of embeddings, a search and tiles, each client in its order."""
            connection = http.client.HTTPConnection(*address, timeout=900)
            facts = json.loads(get(connection, ""))
            sizes = {}
            for number, layer in enumerate(facts["layers"]):
                if layer["kind"] in ("colours", "classes"):
                    per_tile = 3 if layer["kind"] == "colours" else 1
                    sizes[f"/layers/{number}"] = 20 + TILES * (8 + per_tile)
            paths = [*sizes, "/similar/0/0/0"]
            paths += [f"/tiles/{len(facts['levels']) - 1}/0/{row}" for row in range(3)]
            for turn in range(len(paths)):
                path = paths[(turn + client) % len(paths)]
                data = get(connection, path)
                if path in sizes:
                    assert len(data) == sizes[path]
                if path.startswith("/similar"):
                    found = json.loads(data.splitlines()[-1])
                    assert len(found["slide"]) == 12 and found["done"] == found["of"]
            connection.close()

        with ThreadPoolExecutor(clients) as pool:
            for done in [pool.submit(ask, client) for client in range(clients)]:
                done.result()
        status = Path(f"/proc/{process.pid}/status").read_text()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
    peak = int(status.split("VmHWM:")[1].split()[0]) << 10
    assert peak < 512 * MIB, f"{peak / MIB:.0f} MiB"
