"""Slides to batches: prefetch across slides, bounded queues, decoding, transfer."""
