"""The tile grid, tile filters and the tile table."""
