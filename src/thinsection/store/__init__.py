"""Results on disk: names, dtypes, chunks, the feature cache, the resume ledger."""
