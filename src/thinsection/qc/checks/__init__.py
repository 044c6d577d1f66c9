"""The checks of quality control; `check` says what one is."""
