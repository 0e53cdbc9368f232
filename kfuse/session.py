"""This process's session: `init()` finds out how the process was started, and joins the others.

By a kfuse supervisor (the group may change while training), by torchrun or with torch's process group initialised (a
fixed group), or plainly (one worker).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch
import torch.distributed as dist

from kfuse.comm import devices
from kfuse.comm.devices import DeviceError
from kfuse.comm.group import Group, drop_retired, keep_for_ever
from kfuse.comm.settings import CommOptions
from kfuse.elastic import protocol
from kfuse.membership import Session
from kfuse.settings import rules
from kfuse.settings.declared import CommSettings
from kfuse.settings.tree import by_key, resolved

if TYPE_CHECKING:  # only where there are other workers
    from kfuse.elastic.client import ControlClient
    from kfuse.elastic.rendezvous import Rendezvous
    from kfuse.elastic.replica import Replica

_CLOSE_S = 5.0  # how long an ending process waits until the others end too

_current: Session | None = None


def init(**settings: Unpack[CommSettings]) -> Session:
    """Joins the other workers and returns the session; a second call returns the first one's.

    settings: `comm_reproducible=True`, ...: docs/reference.md lists them. With this one torch is set to one CPU thread,
    since a matrix product's bits depend on the number of threads. The first optimizer calls this function, if nothing
    has before. Raises ConfigError (a ValueError) for settings that are not allowed, RuntimeError if a session exists
    with others, DeviceError for a GPU that is not there, ControlError or CommError if joining fails.
    """
    values = resolved("kf.init", CommSettings, settings)
    comm_options, timeout_s = CommOptions.of(values), values["comm_timeout_s"]
    if _current is not None:
        _check_torchs_group(_current)
        has = _current.comm.named() | {"comm_timeout_s": _current.group.timeout_s}
        if any(values[name] != has[name] for name in settings):
            raise RuntimeError(
                "kf.init: this process has a session already, with other settings. Call kf.init before the first "
                "optimizer is made; for other settings start the process (the notebook's kernel) anew"
            )
        return _current
    ranks = int(os.environ["WORLD_SIZE"]) if protocol.ENV_REPLICA in os.environ else 1
    rules.check(by_key(values) | {"job.gpus": devices.count() or None, "job.ranks": ranks})
    if comm_options.reproducible:
        torch.set_num_threads(1)
    if protocol.ENV_REPLICA in os.environ:
        from kfuse.elastic.replica import Replica

        replica = Replica(timeout_s)
        return connect_to_supervisor(replica.link, comm_options, timeout_s, replica)
    if protocol.ENV_CONTROL in os.environ:
        from kfuse.elastic.client import ControlClient

        return connect_to_supervisor(ControlClient(timeout_s), comm_options, timeout_s)
    if "WORLD_SIZE" in os.environ or (dist.is_available() and dist.is_initialized()):
        from kfuse.elastic.rendezvous import Rendezvous

        rendezvous = Rendezvous.of_torch() or Rendezvous.of_environment()
        if rendezvous is not None and rendezvous.size > 1:
            return join_fixed_group(rendezvous, comm_options, timeout_s)
    return _use(Session(Group(device=_take_device(comm_options), timeout_s=timeout_s), comm_options))


def _use(session: Session) -> Session:
    global _current
    _current = session
    return session


def current() -> Session:
    """The session; made with default options if there is none yet."""
    return init()


def _check_torchs_group(session: Session) -> None:
    """Raises RuntimeError where the script has initialised torch's process group after this session of one worker."""
    if not session.elastic and session.group.size == 1 and dist.is_available() and dist.is_initialized():
        size = dist.get_world_size()
        if size > 1:
            raise RuntimeError(
                f"torch.distributed has {size} ranks, and kfuse was initialised before, with this process alone: call "
                "init_process_group before kf.init and before the first optimizer of kfuse is made"
            )


def reset() -> None:
    """Forgets the session, so that `init` may be called again in the same process."""
    global _current
    if _current is not None:
        _current.link.close()
    _current = None


def connect_to_supervisor(
    client: ControlClient, comm: CommOptions, timeout_s: float, replica: Replica | None = None
) -> Session:
    """The session of a worker that a supervisor started. Its group has this worker only, until `join`.

    replica: where the worker has several processes. Raises ValueError for a schedule that needs a fixed number of
    workers.
    """
    from kfuse.elastic import notice  # these are of workers that a supervisor started only
    from kfuse.logs import set_up_logging
    from kfuse.observe.lock import share

    rules.check(by_key(comm.named()) | {"job": "elastic"})
    if "observe" in client.job:
        set_up_logging(client.job["observe"]["log_level"], f"worker {client.worker}")
    notice.pass_on(client)
    made = _use(Session(Group(device=_take_device(comm), timeout_s=timeout_s), comm, client, replica))
    if "run_dir" in client.job:
        made.run_dir = share(Path(client.job["run_dir"]))
    _close_at_exit(made)
    return made


def join_fixed_group(rendezvous: Rendezvous, comm: CommOptions, timeout_s: float) -> Session:
    """The session of a worker of a job of fixed size, in its only view. Raises CommError if others do not connect."""
    group, view = rendezvous.form_group(_take_device(comm), timeout_s)
    group.first_steps.add(group)
    if comm.tree == "latency":
        from kfuse.comm.topology import measure  # few jobs need it

        measure(group)
    made = _use(Session(group, comm))
    made.view = view
    made.log_view()
    _close_at_exit(made, rendezvous)
    return made


def _close_at_exit(made: Session, rendezvous: Rendezvous | None = None) -> None:
    """Closes the session's groups when this process, and not a forked child, is about to end.

    rendezvous: of a job of fixed size, whose workers wait for each other, unless one has failed.
    """
    process = os.getpid()

    def close() -> None:
        if os.getpid() != process:
            return
        failed = made.lost or getattr(sys, "last_value", None) is not None
        if rendezvous is not None and not failed:
            with contextlib.suppress(RuntimeError):  # the others take longer, or are gone
                rendezvous.await_others_at_end(_CLOSE_S)
        made.group.close(0.0 if failed else _CLOSE_S)
        if devices.of(made.group.device).asynchronous:
            drop_retired()
        else:
            keep_for_ever(made.group)
        made.link.close()

    atexit.register(close)


def _take_device(comm: CommOptions) -> torch.device:
    """This worker's device, set up for `comm`, and the current one from now on. Raises DeviceError if it cannot be."""
    device = devices.of(_choose_device())
    if comm.reproducible and device.asynchronous:
        from kfuse.determinism import make_deterministic

        make_deterministic()  # before the GPU is used
    device.make_current()
    return device.name


def _choose_device() -> torch.device:
    """The GPU that LOCAL_RANK, set by a launcher, names among those that this process sees; without it the current one.

    The CPU where it sees none. Raises DeviceError for a GPU that is not there: NCCL refuses two workers on one.
    """
    gpus, given = devices.count(), os.environ.get("LOCAL_RANK")
    if gpus == 0:
        return torch.device("cpu")
    if given is None and gpus > 1 and protocol.ENV_CONTROL in os.environ:
        raise DeviceError(f"LOCAL_RANK is not set: must be 0 to {gpus - 1}, the GPU that its launcher gives a worker")
    index = devices.current() if given is None else int(given)
    if index >= gpus:
        raise DeviceError(
            f"LOCAL_RANK={index}: must be below {gpus}, the number of GPUs that this process sees, as each worker "
            "needs one of its own; where each process sees its own GPU only, LOCAL_RANK=0"
        )
    return torch.device("cuda", index)
