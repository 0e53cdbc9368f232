"""`kfuse report RUN_DIR...`: one HTML page about runs."""
