"""Plans a few jobs on one cluster: who gets how many workers and which batch size."""
