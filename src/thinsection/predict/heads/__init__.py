"""Heads: the tile embeddings of a slide or a case in; logits and each tile's evidence out."""
