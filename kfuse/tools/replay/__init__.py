"""`kfuse replay`: what a policy would have decided on a recorded run, in how many steps and samples, without training.

`command` reads what is asked for, `steps` rebuilds the run and makes another policy's steps, `run` asks the policy
after each step and compares its decisions with the recorded ones, and `report` prints.
"""
