"""What a run leaves behind and shows: the run directory, the display, the recorder that writes to both, log lines."""
