"""The training loop: one step from its samples to its report, for kf.fit, kf.DataLoader and the command line."""
