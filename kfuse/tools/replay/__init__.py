"""`kfuse replay`: what a policy would have decided on a recorded run, in how many steps and samples."""
