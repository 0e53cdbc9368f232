"""What rank 0 decided reaches the others by its number, exactly, and a wait for it has an end that names it."""

from __future__ import annotations

import pytest
from distributed import on_workers

import kfuse as kf
from kfuse.comm.group import CommError
from kfuse.session import current
from kfuse.train.decisions import Published

CONTENT = {"batch_size": 2**40, "lr": 0.1 + 2**-55, "tree": [1, 1, 1], "sync": "local:4"}


@pytest.mark.full
@on_workers(2)
def test_it_arrives_exactly_and_what_does_not_arrive_is_named() -> None:
    session = kf.init(comm_timeout_s=2.0)
    session.group.timeout_s = 60.0  # of the barriers: rank 0 is in one while rank 1 waits 2 s for what does not come
    published = Published(session)
    if kf.rank() == 0:  # numbers from 1; the first ones are deleted meanwhile
        assert [published.send({**CONTENT, "stop": count}) for count in range(70)] == list(range(1, 71))
    kf.barrier()
    found = [published.receive(0, number) for number in (69, 70)]
    assert found == [{**CONTENT, "stop": 68}, {**CONTENT, "stop": 69}]
    if kf.rank() == 1:
        with pytest.raises(CommError, match="decision 1000 of rank 0"):
            published.receive(0, 1000)
    kf.barrier()


def test_one_process_needs_no_store() -> None:
    published = Published(current())
    assert published.receive(0, published.send(CONTENT)) == CONTENT
