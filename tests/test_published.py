"""What rank 0 decided reaches the others by its number, exactly, and a wait for it has an end."""

from __future__ import annotations

import pytest
from distributed import on_workers

import kfuse as kf
from kfuse.elastic.link import Link
from kfuse.session import current

CONTENT = {"batch_size": 2**40, "lr": 0.1 + 2**-55, "tree": [1, 1, 1], "sync": "local:4"}


@pytest.mark.full
@on_workers(2)
def test_it_arrives_exactly_and_what_does_not_arrive_is_an_error() -> None:
    link = kf.init(comm_timeout_s=2.0).link
    current().group.timeout_s = 60.0  # of the barriers: rank 0 is in one while rank 1 waits 2 s for what does not come
    if kf.rank() == 0:  # numbers from 1; the first ones are deleted meanwhile
        assert [link.publish({**CONTENT, "stop": count}) for count in range(70)] == list(range(1, 71))
    kf.barrier()
    found = [link.fetch(0, number, 2.0) for number in (69, 70)]
    assert found == [{**CONTENT, "stop": 68}, {**CONTENT, "stop": 69}]
    if kf.rank() == 1:
        with pytest.raises(RuntimeError):
            link.fetch(0, 1000, 2.0)
    kf.barrier()


def test_one_process_needs_no_store() -> None:
    link = Link()
    assert link.fetch(0, link.publish(CONTENT), 2.0) == CONTENT
