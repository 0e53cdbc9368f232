"""Commands that train nothing, beside `kfuse` itself: `kfuse.cli.app` imports one by name when its word is given."""
