"""What a run leaves behind and shows: its log lines, run directory and display."""
