"""A worker process of the command line: gets the configuration from its supervisor, builds, joins, trains, reports."""

from __future__ import annotations

import os
import sys
import traceback

from kfuse import session
from kfuse.cli.first import ENV_FIRST, become_worker
from kfuse.comm.settings import CommOptions
from kfuse.elastic.client import ControlClient
from kfuse.elastic.protocol import ControlError
from kfuse.optim import ConsistencyError
from kfuse.settings.tree import ConfigError, flat
from kfuse.train.build import build_trainer, set_threads


def main() -> int:
    """Returns the exit status; 0: trained, or left as planned. The supervisor shows other errors' traceback."""
    # A class of the user's own (`model._target_=my.Net`) is looked for where the command was given.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if ENV_FIRST in os.environ:
        become_worker()
    client = ControlClient()
    config = client.job
    timeout_s = config["comm"]["timeout_s"]
    set_threads(config)
    session.connect_to_supervisor(client, CommOptions.of(flat(config)), timeout_s)
    trainer = build_trainer(config)
    try:
        trainer.run()
    except (ControlError, ConsistencyError, ConfigError) as error:
        print(f"kfuse: worker {client.worker} ends: {error}", file=sys.stderr)
        return 1
    finally:
        client.close()
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: while a message to a lost worker is under way, the process group's destructor would block.
    os._exit(status)
