"""One evaluation engine: cases, splits, metrics, intervals and tests, for every command."""
