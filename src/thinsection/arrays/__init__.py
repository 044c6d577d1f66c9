"""The one place that knows NumPy/SciPy/scikit-image on a CPU and CuPy/cupyx on a GPU."""

from thinsection.arrays.namespace import Array, ArrayNamespace, get_namespace

__all__ = ["Array", "ArrayNamespace", "get_namespace"]
