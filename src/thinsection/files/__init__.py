"""Files of any kind: atomic writes, locks, byte sources, pages."""
