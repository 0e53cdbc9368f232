"""`kfuse cbs` and `kf.critical_batch`: the critical batch size, measured by branches of one training."""
