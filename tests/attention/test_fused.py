"""PyTorch's fused attention, tried by its form for CPUs; on a card `gpu_checks` runs it."""

import pytest
import torch

from thinsection.attention import fused
from thinsection.attention.fused import agrees, is_fused
from thinsection.attention.reach import LOG2E

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def untried() -> None:
    agrees.cache_clear()


@pytest.mark.parametrize("dim", [48, 64, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trial_finds_the_kernel_right(dtype: torch.dtype, dim: int) -> None:
    assert agrees(CPU, dtype, dim)


@pytest.mark.parametrize("fault", ["scale", "log sums", "NaN", "not built"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_that_is_wrong_or_missing_is_not_used(
    dtype: torch.dtype, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fused.fused_attention

    def wrong(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if fault == "not built":
            raise RuntimeError("no kernel image is available")
        out, log_sums = right(q * 1.5 if fault == "scale" else q, k, v)
        if fault == "NaN":
            out[0, 0, 0, 0] = torch.nan
        return out, log_sums / LOG2E if fault == "log sums" else log_sums

    monkeypatch.setattr(fused, "fused_attention", wrong)
    assert not agrees(CPU, dtype, 48)


def test_a_cpu_and_float64_keep_the_blocks() -> None:
    assert not is_fused(torch.zeros(2, 3, 48))
    assert not is_fused(torch.zeros(2, 3, 48, dtype=torch.float64))
