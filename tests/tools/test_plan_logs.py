"""`kfuse plan LOG.csv gpus=FILE`: replays against a second-by-second one, and one clear line for each mistake."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfuse.cli.app import main
from kfuse.tools.plan import logs
from kfuse.tools.plan.logs import ORDERS, LoggedJob, compare, needed, read, replay

Capsys, Patch, SIZE = pytest.CaptureFixture[str], pytest.MonkeyPatch, 4
QUICK = {"TICK_S": 3, "BOOT_S": 4, "CALM": 2, "AHEAD": 1}
LOG = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1,a,v,8,8,1,COMPLETED,2020-06-01 00:00:00,2020-06-01 00:00:00,2020-06-01 01:00:00,3600,0
2,a,v,8,8,1,FAILED,2020-06-01 00:10:00,2020-06-01 01:00:00,2020-06-01 02:00:00,3600,3000
3,b,v,1,8,1,COMPLETED,2020-06-01 00:20:00,2020-06-01 02:00:00,2020-06-01 02:01:00,60,6000
4,b,v,1,8,1,CANCELLED,2020-06-01 00:30:00,,,0,0
5,b,v,0,8,1,COMPLETED,2020-06-01 00:30:00,2020-06-01 00:30:00,2020-06-01 00:30:09,9,0
6,b,v,16,8,2,CANCELLED,2020-06-01 00:40:00,2020-06-01 00:50:00,2020-06-01 00:50:01,1,600
"""
GPUS = "date,v,w,total\n2020-06-01,8,0,8\n2020-06-02,8,8,16\n"


@st.composite
def traces(draw: st.DrawFn) -> list[LoggedJob]:
    job = st.builds(LoggedJob, st.sampled_from("ab"), st.integers(1, 2 * SIZE), st.integers(0, 40), st.integers(1, 25))
    return sorted(draw(st.lists(job, min_size=1, max_size=12)), key=lambda job: job.submit)


def by_the_second(jobs: Sequence[LoggedJob], nodes: int, order: str) -> list[float]:
    """Starts of the jobs: each second anew, without events or heaps."""
    starts, queue, keys, ended = [float("nan")] * len(jobs), list[int](), dict[int, float](), list[int]()
    for now in range(700):
        ended += [j for j, job in enumerate(jobs) if starts[j] + job.duration == now]
        for j, job in enumerate(jobs):
            if job.submit == now:
                queue, seconds = [*queue, j], 3600.0
                for same in range(3):
                    past = [jobs[e].duration for e in ended if jobs[e][:same] == job[:same]]
                    seconds = (sum(past) + 4 * seconds) / (len(past) + 4)
                of = {"FIFO": 0, "GPUs alone": 1, "QSSF": seconds, "oracle": job.duration}
                keys[j] = of[order] * job.gpus
        for j in sorted(queue, key=lambda j: (keys[j], j)):
            running = sum(jobs[k].gpus for k in range(len(jobs)) if starts[k] <= now and k not in ended)
            if running + jobs[j].gpus > nodes * SIZE:
                break
            queue.remove(j)
            starts[j] = now
    return starts


orders = st.sampled_from([*ORDERS])


@given(jobs=traces(), nodes=st.integers(2, 4), order=orders)
def test_starts_are_those_by_the_second(jobs: list[LoggedJob], nodes: int, order: str) -> None:
    starts, _ = replay((jobs, nodes), order, False, SIZE)
    np.testing.assert_array_equal(starts, by_the_second(jobs, nodes, order))


@given(jobs=traces(), nodes=st.integers(2, 4), order=orders)
def test_nodes_that_sleep_lose_no_job(jobs: list[LoggedJob], nodes: int, order: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUICK.items():
            patch.setattr(logs, name, value)
        starts, _ = replay((jobs, nodes), order, True, SIZE)
    for job, start in zip(jobs, starts, strict=True):
        together = zip(jobs, starts, strict=True)
        used = sum(other.gpus for other, at in together if at <= start < at + other.duration)
        assert start >= job.submit and used <= SIZE * nodes


def test_releases_by_hand(monkeypatch: Patch) -> None:
    """Of 3 nodes 2 sleep from the 4th tick on, as the forecast is 1, that in use; one boots for the job of 5 GPUs."""
    for name, value in (QUICK | {"TICK_S": 100, "BOOT_S": 50}).items():
        monkeypatch.setattr(logs, name, value)
    jobs = [LoggedJob("a", 1, 0, 9000), LoggedJob("a", 5, 4950, 10), LoggedJob("a", 5, 5000, 10)]
    starts, idle_s = replay((jobs, 3), "FIFO", True, SIZE)
    assert starts.tolist() == [0, 5000, 5010] and idle_s == 2 * 400 + 50
    assert [needed(peaks, 3) for peaks in ([1], [1, 2, 1, 1], [1, 1, 1, 1], [1, 1, 3, 1])] == [3, 2, 1, 3]


def kfuse(capsys: Capsys, monkeypatch: Patch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["kfuse", "plan", *words])
    return main(), *capsys.readouterr()


def files(folder: Path, log: str = LOG, gpus: str = GPUS) -> tuple[str, str]:
    for name, text in (("log.csv", log), ("gpus.csv", gpus)):
        (folder / name).write_text(text)
    return str(folder / "log.csv"), f"gpus={folder / 'gpus.csv'}"


def test_the_figures_by_hand(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    """By arrival jobs end after 3600, 6600, 6060 s; with the small one first after 3600, 6660 and 2460 s."""
    status, out, err = kfuse(capsys, monkeypatch, *files(tmp_path))
    assert (status, err) == (0, "")
    figures = [line.split(maxsplit=1) for line in out.splitlines()]
    assert figures[:3] == [["1.51", "FIFO"], ["1.18", "GPUs alone"], ["1.18", "QSSF"]]
    assert [float(value) for value, _ in figures[3:]] == [1.18, 100, 100, 0, 0, 0, 3]


WRONG = [
    (LOG.replace(",8,8,1,", ",-8,8,1,", 1), GPUS, "log.csv: line 2: ", "must have user, vc, gpu_num"),
    (LOG.replace("00:10:00", "24:10:00", 1), GPUS, "log.csv: line 3: ", "submit_time as 2020-06-09 18:41:01"),
    (LOG.replace("2,a,v", "2,a,x"), GPUS, "log.csv: line 3: ", "lacks vc x"),
    (LOG.replace("gpu_num", "gpus"), GPUS, "log.csv: line 2: KeyError: 'gpu_num'", "must have user, vc"),
    (LOG + "7,a,v", GPUS, "log.csv: line 8: ", "must have user"),
    (LOG[: LOG.index("1,a")], GPUS, "log.csv: ", "must have a job with gpu_num above 0 that has started"),
    (LOG, GPUS.replace("06-02", "06-31"), "gpus.csv: line 3: ", "must have date as 2020-06-09"),
    (LOG, "", "log.csv: line 2: ", "lacks vc v"),
]


def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    for log, gpus, where, must in WRONG:
        status, out, err = kfuse(capsys, monkeypatch, *files(tmp_path, log, gpus))
        assert (status, out, err.count("\n")) == (2, "", 1) and where in err and must in err, err
    given = files(tmp_path)
    status, _, err = kfuse(capsys, monkeypatch, *given, "workers=4")
    assert status == 2 and "workers=4: must be one file" in err and err.count("\n") == 1
    status, _, err = kfuse(capsys, monkeypatch, "nowhere.csv", given[1])
    assert status == 2 and "nowhere.csv" in err and err.count("\n") == 1


def test_a_drawn_log_is_read(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("cluster_log")
    log, gpus = script.draw(tmp_path, script.Kind(clusters=1, days=4), 0)
    found = compare(read(str(log), str(gpus)))
    assert found["jobs"] > 100 and found["oracle"] <= found["FIFO"]
