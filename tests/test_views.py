"""How a worker goes from one view to the next: `Session.switch`; whom the supervisor takes into a view."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kfuse.comm.group import Group
from kfuse.comm.options import CommOptions
from kfuse.elastic.job import Elasticity, Job
from kfuse.elastic.processes import Processes, State, Worker
from kfuse.elastic.protocol import Member, View
from kfuse.elastic.views import Views
from kfuse.membership import Session


class Supervised:
    """A connection over which one view comes."""

    worker = 1

    def __init__(self, view: View) -> None:
        self.view, self.sent = view, list[str]()

    def await_view(self, generation: int, timeout_s: float) -> View:
        return self.view

    def send(self, message: str, **fields: Any) -> None:
        self.sent.append(message)

    def forget(self, generation: int) -> None:
        pass


class Told(Group):
    """The group before: what it is told, and what happens in it."""

    def __init__(self) -> None:
        super().__init__()
        self.told = list[str]()

    def finish(self) -> None:
        self.told.append("finish")

    def abort(self) -> None:
        self.told.append("abort")

    def take_leave(self, new_ranks: object, size: int) -> None:
        self.told.append("take leave")


@pytest.mark.parametrize(("recovers", "told"), [(False, ["take leave", "finish"]), (True, ["abort"])])
@pytest.mark.parametrize(("member", "sent"), [(1, ["joined"]), (2, ["left"])])
def test_only_before_a_planned_view_the_group_has_messages(
    recovers: bool, told: list[str], member: int, sent: list[str]
) -> None:
    """A view that recovers may come in place of the planned one: a worker of the group is lost."""
    client: Any = Supervised(View(3, (Member(member, 1, "here"),), ("127.0.0.1", 1), "shrink", recovers))
    group = Told()
    session = Session(group, CommOptions(), client)
    session.view = View(1, (Member(0, 1, "here"), Member(1, 1, "here")), ("127.0.0.1", 1), "start")
    session.on_planned_change(group.take_leave)
    assert session.switch(2) == (member == 1)
    assert group.told == told and client.sent == sent
    assert session.left == (member == 2)


def three(wanted: int) -> tuple[Job, Processes, Views]:
    """A job whose view has three workers, and that is to have `wanted`."""
    job, nothing = Job(Elasticity(3, 1, 4)), SimpleNamespace(progress=0)
    processes = Processes(SimpleNamespace(), job, nothing, lambda *_: None)  # type: ignore[arg-type]
    views = Views(job, processes, nothing)  # type: ignore[arg-type]
    views.host = "127.0.0.1"
    for number in range(3):
        process: Any = SimpleNamespace(running=True)
        processes.workers[number] = Worker(number, process, State.READY)
    views.propose()
    for worker in processes.workers.values():
        views.joined(worker, 1)
    job.wanted = wanted
    views.propose()
    assert members(job) == list(range(wanted)) and job.view is not None and job.view.reason == "shrink"
    return job, processes, views


def members(job: Job) -> list[int]:
    assert job.view is not None
    return [member.worker for member in job.view.members]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_worker_that_is_to_leave_is_in_the_view_that_recovers(generation: int) -> None:
    """It has lost contact itself, in the view before or on its way out of it. Then it leaves all the same."""
    job, processes, views = three(wanted=2)
    views.contact_lost(processes.workers[2], generation, "why")
    assert job.view is not None and job.view.recovers and members(job) == [0, 1, 2]
    for worker in processes.workers.values():
        views.joined(worker, 3)
    assert members(job) == [0, 1] and not job.view.recovers


def test_one_that_has_left_is_in_no_view() -> None:
    """Also where its word of it comes after a view that recovers was formed with it."""
    job, processes, views = three(wanted=2)
    processes.workers[0].state = State.ENDED
    views.recover()
    assert members(job) == [1, 2]
    views.left(processes.workers[2])
    assert members(job) == [1] and job.view is not None and job.view.recovers
    views.left(processes.workers[2])
    assert job.view.generation == 4
    views.recover()
    assert members(job) == [1]
