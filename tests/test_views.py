"""One worker's session in an elastic job: how it goes from one view to the next, and that it trains once at a time."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, call

import pytest

from kfuse.comm.group import Group
from kfuse.comm.settings import CommOptions
from kfuse.elastic.protocol import Member, View
from kfuse.membership import Session


class Optimizer(Mock):
    def hand_over(self, leavers: Any) -> None:
        self.group.hand_over(leavers)


@pytest.mark.parametrize("recovers", [False, True])
@pytest.mark.parametrize("stays", [True, False])
def test_only_before_a_planned_view_the_group_has_messages(recovers: bool, stays: bool) -> None:
    """A view that recovers may come in place of the planned one: a worker of the group is lost."""
    next_view = View(3, (Member(1 if stays else 2, 1, "here"),), ("127.0.0.1", 1), "shrink", recovers)
    client, group = Mock(worker=1), Mock(device=Group().device, timeout_s=1.0)
    client.await_view.return_value = next_view
    session = Session(group, CommOptions(), client)
    session.view = View(1, (Member(0, 1, "here"), Member(1, 1, "here")), ("127.0.0.1", 1), "start")
    optimizer = Optimizer(group=group)
    session.on_planned_change(optimizer.hand_over)
    assert session.switch(2) == stays and session.left == (not stays)
    planned = [call.hand_over([0] if stays else [0, 1]), call.finish()]
    told = [each for each in group.mock_calls if each != call.retire()]
    assert told == ([call.abort()] if recovers else planned)
    assert [each.args for each in client.send.mock_calls] == [("joined",) if stays else ("left",)]


def test_a_training_within_another_is_refused() -> None:
    session = Session(Group(), CommOptions(), Mock())
    session.begin_training()
    with pytest.raises(RuntimeError, match=r"another kf\.fit or kf\.DataLoader of this process is under way"):
        session.begin_training()
    session.end_training(None)
    session.begin_training()
