"""Small data under the names that the pages use."""

INPUTS = frozenset(["slides"])
