"""A retired group is freed at once, with its threads and sockets."""

from __future__ import annotations

import gc
import weakref

from kfuse.comm.group import Group, Pending


def test_a_retired_group_is_gone_at_once() -> None:
    """With its sockets and threads: they must not wait for the garbage collector, which comes to old objects late."""
    gc.disable()
    try:
        group = Group()
        Pending(group, "a message whose failure nobody waited for", [])
        gone = weakref.ref(group)
        group.retire()
        del group
        assert gone() is None
    finally:
        gc.enable()
