"""The one place that knows NumPy/SciPy/scikit-image on a CPU and CuPy/cupyx on a GPU."""

from thinsection.arrays.namespace import (
    Array,
    ArrayNamespace,
    as_numpy,
    get_namespace,
)

__all__ = ["Array", "ArrayNamespace", "as_numpy", "get_namespace"]
