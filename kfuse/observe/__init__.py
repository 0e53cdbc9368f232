"""What a run leaves behind and shows: the run directory, the display, and the recorder that writes to both."""

from kfuse.observe.display import Display
from kfuse.observe.recorder import Recorder
from kfuse.observe.run_dir import RunDirectory

__all__ = ["Display", "Recorder", "RunDirectory"]
