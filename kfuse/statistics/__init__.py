"""What a step measures: its moments, the running noise scale, and their way from the device to the host."""
