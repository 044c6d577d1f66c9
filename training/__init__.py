"""Scripts that train the networks of the package; no part of what users install."""
