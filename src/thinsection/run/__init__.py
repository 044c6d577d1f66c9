"""Tasks, executors and the run that holds them together."""
