"""Runs a policy over a recorded run, without training: what it would have decided, in how many steps and samples.

`recorded` rebuilds the run from its files' lines, `steps` makes a replay's steps, `run` asks the policy after each of
them, and `events` compares its decisions with the recorded ones. The command `kfuse replay` is in kfuse/cli/replay.py.
"""
