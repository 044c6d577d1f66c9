"""One file for each reader, and what readers share: segments, alpha, channels, headers."""
