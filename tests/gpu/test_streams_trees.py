"""Steps along trees of all shapes, on a recorded device: all uses of memory are in order."""

from __future__ import annotations

import pytest
from gpu.steps import SMALL_BUCKETS, job

from kfuse.comm.topology import Links

FAST, SLOW = 1e9, 1e7
LINKS = Links(
    tuple(tuple(0.0 if a == b else 1e-4 for b in range(4)) for a in range(4)),
    tuple(tuple(None if a == b else SLOW if {a, b} == {0, 1} else FAST for b in range(4)) for a in range(4)),
)


@pytest.mark.parametrize("tree", ["host", "latency", (0, 0, 0, 0), (1, 1, 1, 0), (3, 0, 0, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}], ids=str)
def test_steps_along_a_tree(tree: str | tuple[int, ...], options: dict[str, str]) -> None:
    with job(size=4, schedule="tree", bucket_mb=SMALL_BUCKETS, all_used=True, **options) as it:
        it.group.hosts = ["a", "b", "a", "b"]
        it.group.take_links(LINKS)
        it.opt.engine.use_transport(None, tree)
        for _ in range(2):
            it.bare_step()
            it.step()
        it.forwards_on_two_streams("sometimes")
        it.step()
