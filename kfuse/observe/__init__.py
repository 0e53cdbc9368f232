"""What a run leaves behind and shows: the run directory and the display."""

from kfuse.observe.display import Display
from kfuse.observe.run_dir import METRICS, RunDirectory

__all__ = ["METRICS", "Display", "RunDirectory"]
