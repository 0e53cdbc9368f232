"""The command line's configuration: its schema, what is allowed, how a mistake is said, and what is built of it."""
