"""The devices on which operations of `arrays` are tested."""

import importlib.util

import pytest

from thinsection.arrays import ArrayNamespace, get_namespace
from thinsection.errors import DeviceError


def why_no_gpu() -> str:
    """Why there is no GPU namespace, or '' if there is one."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        get_namespace("cuda")
    except DeviceError as error:
        return str(error)
    return ""


GPU = pytest.param(
    "cuda",
    marks=(
        pytest.mark.gpu,
        pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu() or "-"),
    ),
)


@pytest.fixture(params=["cpu", GPU])
def ns(request: pytest.FixtureRequest) -> ArrayNamespace:
    return get_namespace(request.param)
