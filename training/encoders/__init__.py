"""Makes the weights that the package contains."""
