"""`run` and related functions: a cohort through the graph of stages."""
