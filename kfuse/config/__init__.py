"""The command line's configuration: its schema, its checks, its error messages, and what is built from it."""
