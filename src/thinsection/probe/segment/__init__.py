"""The segmentation probe: datasets, the head and its training, the probe."""
