"""Functions that read and maintain a results folder."""
