"""Cost models: memory and time before anything runs."""
