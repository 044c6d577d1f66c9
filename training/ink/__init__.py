"""The training of the ink network: `python -m training.ink.train`."""
