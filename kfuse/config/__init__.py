"""The command line's configuration: its schema, what is allowed, and how a mistake is said."""

from kfuse.config.check import validate
from kfuse.config.messages import explain, explain_flag
from kfuse.config.schema import Config, ConfigError
from kfuse.config.settle import drop_replaced

__all__ = ["Config", "ConfigError", "drop_replaced", "explain", "explain_flag", "validate"]
