"""`kfuse doctor`: whether this machine can run kfuse."""
