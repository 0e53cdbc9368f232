"""Workers that come and go: the supervisor, its control channel, and how workers are launched."""
