"""Checkpoints: the files (format) and when a run writes and reads them (manager)."""
