"""Hydra's config groups: a folder a group, a file an option."""
