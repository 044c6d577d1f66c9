"""The Triton kernel compiled ahead of time, without a card: registers, spills, shared memory."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from thinsection.attention.api import capability_obstacle
from thinsection.attention.blocks import plan_blocks
from thinsection.attention.reference import AttentionItem

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from thinsection.attention import triton_kernel  # noqa: E402
from thinsection.attention.triton_kernel import _attend_kernel, launch_shape  # noqa: E402

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# what one block may take on the cards with least of it (sm_86, sm_89); sm_80 and sm_90 give more
SHARED_BYTES = 99 * 1024
REGISTERS = 255  # that a thread can have at all
CASES = [(90, t, d) for t in TYPES for d in (64, 128, 256)]
CASES += [
    (sm, *case)
    for sm in (80, 100)
    for case in (("fp32", 64), ("bf16", 64), ("bf16", 128))
]


def compiled(
    capability: int, dtype: str, dim: int, shape: tuple[int, int, int, int]
) -> Any:
    """As `forward_triton` launches it: arrays and strides are multiples of 16."""
    arrays = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    arrays |= dict.fromkeys(("cells_ptr", "slopes_ptr", "lse_ptr"), "*fp32")
    queries, keys, num_warps, num_stages = shape
    constants = {"D": dim, "BLOCK_M": queries, "BLOCK_N": keys, "UPCAST": False}
    signature, aligned = {}, {}
    for place, name in enumerate(_attend_kernel.arg_names):
        kind = (
            "constexpr" if name in constants else "fp32" if name == "scale" else "i32"
        )
        signature[name] = arrays.get(name, kind)
        if name in arrays or name.endswith(("_head", "_token")):
            aligned[place,] = [["tt.divisibility", 16]]
    source = ASTSource(_attend_kernel, signature, constants, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=options
    )


def usage(kernel: Any, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, as the assembler says."""
    ptx = kernel.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)[1]
    (folder / "kernel.ptx").write_text(ptx)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    tool = tools / ("ptxas-blackwell" if target.startswith("sm_10") else "ptxas")
    command = [tool, "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"]
    said = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    ).stderr
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return int(re.search(r"Used (\d+) registers", said)[1]), int(spilled[1]) + int(
        spilled[2]
    )


@pytest.mark.parametrize("capability,dtype,dim", CASES)
def test_no_register_spills_and_blocks_fit_on_every_card(
    capability: int,
    dtype: str,
    dim: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = compiled(capability, dtype, dim, launch_shape(TYPES[dtype], dim))
    registers, spilled = usage(kernel, tmp_path)
    assert spilled == 0 and registers <= REGISTERS
    assert kernel.metadata.shared <= SHARED_BYTES


def test_spills_are_seen_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert usage(compiled(90, "fp32", 64, (64, 32, 4, 2)), tmp_path)[1] > 400


def test_cards_before_ampere_do_not_get_the_kernel() -> None:
    assert capability_obstacle((7, 0)) == "needs sm_80 or newer, got sm_70"
    assert capability_obstacle((7, 5)) == "needs sm_80 or newer, got sm_75"
    assert capability_obstacle((8, 0)) is capability_obstacle((12, 0)) is None


def test_the_kernel_is_launched_on_the_card_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton takes the current card, which is another one for tensors on 'cuda:1'."""
    current, launched = [], []

    class Guard:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def __enter__(self) -> None:
            current.append(self.x)

        def __exit__(self, *error: object) -> None:
            current.pop()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda q, *rest, **constants: launched.append((q, list(current)))

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    monkeypatch.setattr(triton_kernel, "_attend_kernel", Kernel())
    q, k, v = torch.zeros(3, 2, 5, 16)
    item = AttentionItem(
        q=q,
        k=k,
        v=v,
        cells=torch.zeros(2, 4),
        slopes=(1.0, 0.5),
        num_prefix_tokens=1,
        scale=0.25,
    )
    triton_kernel.forward_triton(item, plan_blocks(q, budget_bytes=1 << 24))
    ((on_card, guards),) = launched
    assert on_card.device == q.device
    assert [guard.data_ptr() for guard in guards] == [on_card.data_ptr()]
    assert not current
