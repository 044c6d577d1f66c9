"""Makes the results of slides: prepare, stream, encode, write, and what follows a run."""
