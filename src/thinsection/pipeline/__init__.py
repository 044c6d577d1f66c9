"""`run` and its siblings: a cohort through the graph of stages."""
