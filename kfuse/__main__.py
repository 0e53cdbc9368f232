"""`python -m kfuse`: the command line."""

import sys

from kfuse.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
