"""The one place that knows NumPy/SciPy/scikit-image on a CPU and CuPy/cuCIM on a GPU."""
