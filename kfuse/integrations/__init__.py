"""Monitors for training that stays with torch's DDP, FSDP2 or one process: they measure, and change nothing."""
