"""What is probed: labelled sets, and how they are read from disk."""
