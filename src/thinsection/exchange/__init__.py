"""Folders and files of other tools: import and export."""
