"""Moves gradient buckets between workers: layout, reduction order, transports, and the tail that rides with them."""
