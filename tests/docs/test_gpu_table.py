"""The page of benchmarks shows a card from its JSON: of an older one, and of one of today."""

import copy
import importlib.util
import json
from types import ModuleType
from typing import Any

import jinja2
import pytest

from .figures import RESULTS
from .pages import ROOT


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "docs_hooks", ROOT / "docs" / "hooks.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(hooks: ModuleType, gpu: dict[str, Any] | None) -> str:
    """Part of the page about GPUs."""
    made = copy.deepcopy(hooks.records())
    if gpu is not None:
        made["gpu_proof"]["results"] |= gpu
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = (ROOT / "docs" / "benchmarks.md.j2").read_text()
    page = environment.from_string(template).render(
        figures={name: figure["results"] for name, figure in made.items()},
        made=made,
        benchmarks_by_room=hooks.benchmarks_by_room(),
        licences={},
    )
    return str(page.split("## On a GPU")[1])


def cells_of(page: str, first: str) -> list[list[str]]:
    """Cells of the rows whose first cell is this text."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines()]
    return [cells for cells in lines if cells[0] == first]


def test_an_older_json_has_its_figures_and_dashes(hooks: ModuleType) -> None:
    document = json.loads((RESULTS / "gpu_proof.json").read_text())["results"]
    page = rendered(hooks, None)
    rows = cells_of(page, "ViT-L")
    assert [row[1] for row in rows] == ["fp16", "bf16"]
    queues = document["rate vit_l"]["bf16"]["queues"]
    assert rows[1][5] == f"{queues:,.0f}"
    assert rows[1][6:10] == ["–"] * 4
    assert len(cells_of(page, "ViT-L, PyTorch")) == 1
    assert not cells_of(page, "ViT-L, compiled")


def test_a_row_of_today_has_its_share_of_a_product(hooks: ModuleType) -> None:
    row = {
        "flops_per_tile": 1.5e11,
        "loader": 900.4,
        "resident": 2100.0,
        "queues": 2000.0,
        "peak_mib": 4000.0,
        "cosine_fp32": 0.99991,
        "compiled": {"queues": 3000.0, "watts": 651.2, "rows": 128},
    }
    whole = {
        "tiles": 1000,
        "start_s": 9.25,
        "tiles_per_s": 1500.0,
        "first_to_last": 2950.0,
        "gpu_busy": 0.97,
    }
    page = rendered(
        hooks,
        {
            "rate products": {"tflops": 800.0},
            "rate vit_l": {"bf16": row},
            "rate fp8 vit_l": {"fp8": row | {"cosine_fp32": 0.9951}},
            "rate vit_h": {"bf16": row | {"compiled": {"not_compiled": "no triton"}}},
            "rate whole run compiled": whole,
        },
    )
    cells, in_fp8 = cells_of(page, "ViT-L")
    assert (in_fp8[1], in_fp8[11]) == ("fp8", "0.99510")
    assert cells[2:7] == ["150", "900", "2,100", "2,000", "3,000"]
    assert cells[7:10] == ["450", "0.56", "651"]
    assert cells[11] == "0.99991"
    (cells,) = cells_of(page, "ViT-H")
    assert cells[2:7] == ["150", "900", "2,100", "2,000", "–"]
    (cells,) = cells_of(page, "ViT-L, compiled")
    assert cells[2:6] == ["9.2", "1,500", "2,950", "97 %"]
