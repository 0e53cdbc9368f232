"""The commands: `kfuse`, `kfuse-run`, and the worker processes that they start."""
