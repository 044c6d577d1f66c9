"""Results on disk: names, dtypes, chunks, atomic writes, the feature cache, the resume ledger."""

from thinsection.store.atomic import atomic_path, write_bytes, write_json, write_text

__all__ = ["atomic_path", "write_bytes", "write_json", "write_text"]
