"""Every implementation keeps the contract; the Triton kernel through Triton's interpreter too."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attention.contract import Alibi2dContract

from thinsection.attention import chunked
from thinsection.attention.api import attend_items
from thinsection.attention.blocks import BlockPlan
from thinsection.attention.checks import checked_items
from thinsection.attention.chunked import forward_chunked
from thinsection.attention.gradient import differentiable
from thinsection.attention.traced import attend_item_flex


class TestReference(Alibi2dContract):
    impl = "reference"


class TestChunked(Alibi2dContract):
    impl = "chunked"


class TestChunkedOnACpuThatMultipliesBf16(Alibi2dContract):
    """Blocks of bfloat16 are multiplied as such, whatever CPU runs the test."""

    impl = "chunked"

    @pytest.fixture(autouse=True)
    def has_bf16(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunked, "cpu_has_bf16", lambda: True)


class TestChunkedInSmallBlocks(Alibi2dContract):
    """Blocks of 16 x 24 tokens, so that every case has many of them, and ragged ones."""

    impl = "chunked"

    def attend(self, *qkv_cells_slopes: torch.Tensor, **options: Any) -> torch.Tensor:
        items = checked_items(*qkv_cells_slopes, **options)
        plan = BlockPlan(queries=16, keys=24, working_bytes=0)
        return attend_items(
            items, differentiable(forward_chunked, plan), qkv_cells_slopes[0]
        )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestFlexWithoutCompilation(Alibi2dContract):
    """FlexAttention's own arithmetic on a CPU, with our `score_mod`; without its gradient."""

    impl = "flex"
    # PyTorch refuses FlexAttention's backward pass on a CPU
    test_gradients_equal_those_of_float64 = None  # type: ignore[assignment]

    def attend(self, *qkv_cells_slopes: torch.Tensor, **options: Any) -> torch.Tensor:
        items = checked_items(*qkv_cells_slopes, **options)
        return attend_items(items, attend_item_flex, qkv_cells_slopes[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestFlexOnCuda(Alibi2dContract):
    impl = "flex"
    device = "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestTriton(Alibi2dContract):
    impl = "triton"
    device = "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestChunkedOnCuda(Alibi2dContract):
    impl = "chunked"
    device = "cuda"


@pytest.mark.check
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
def test_the_triton_kernel_keeps_the_contract_under_its_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when the kernel is defined."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    suite = str(Path(__file__).with_name("triton_interpreted.py"))
    child = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-W",
            "ignore",
            "--rootdir",
            str(root),
            suite,
        ],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
    )
    assert child.returncode == 0, child.stdout[-3000:]
    assert " passed" in child.stdout
