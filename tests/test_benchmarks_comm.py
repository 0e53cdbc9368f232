"""The communication benchmarks run to their end, and count what the model counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import links

    return links


def measured(folder: Path, *arguments: str) -> dict[str, Any]:
    path = folder / "result.json"
    command = [sys.executable, str(BENCHMARKS / "comm.py"), "--json", str(path), "--rounds", "2", *arguments]
    path_too = os.pathsep.join(filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": path_too,
    }  # where PYTHONSAFEPATH is set, a script's folder is not searched
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.full
def test_every_variant_trains_alike_and_sends_what_the_model_says(tmp_path: Path, links: ModuleType) -> None:
    """It ends with status 1 where a variant's losses are not DDP's. ZeRO broadcasts parameters beside the gradients."""
    [size] = measured(tmp_path, "--megabytes", "1")["sizes"]
    assert {"ddp", "zero", "fsdp2", "allreduce", "sharded", "auto"} < {*size["variants"]}
    assert {"allreduce / allreduce-no-stats", "sharded / zero"} < {*size["pairs"]}
    if links.allowed():  # else the interface counts other processes' bytes too
        sent = {name: variant["bytes_a_parameter"] for name, variant in size["variants"].items()}
        assert sent["allreduce"] == pytest.approx(4.0, rel=0.1)
        assert sent["all_to_all"] == pytest.approx(4.0, rel=0.1)
        assert sent["zero"] == pytest.approx(6.0, rel=0.1)
        assert sent["kfuse-alone"] < 0.1
    without = {name for name, variant in size["variants"].items() if variant["exposed_ms"] is None}
    assert without == {name for name in size["variants"] if "sharded" in name} | {"zero", "fsdp2"}
    own = [size["variants"][name]["exposed_ms"] for name in ("local", "kfuse-alone", "kfuse-alone-no-stats")]
    assert own == [0.0, 0.0, 0.0], "each is its own base"


def test_rates_are_written_as_tc_writes_them(links: ModuleType) -> None:
    with pytest.raises(ValueError, match="rate '2 GB': must be a number and one of kbit, mbit, gbit"):
        links.shaper("2 GB")
    assert links.shaper("2gbit")[:5] == ["tbf", "rate", "2gbit", "burst", "250000"]
    assert links.shaper("1mbit")[4] == "32768", "two packets at least"


def test_a_slow_pair_has_a_cable_of_its_own(links: ModuleType) -> None:
    if not links.allowed():
        return
    with links.links(3, "200mbit", {(0, 2): "20mbit"}) as places:
        way = ["ip", "-n", places[0].namespace, "route", "get"]
        to = {rank: subprocess.check_output([*way, places[rank].address], text=True) for rank in (1, 2)}
        assert "dev eth0" in to[1]
        assert "dev slow2" in to[2]
        for here, interface, rate in ((0, "eth0", "200Mbit"), (0, "slow2", "20Mbit"), (2, "slow0", "20Mbit")):
            shaped = ["tc", "-n", places[here].namespace, "qdisc", "show", "dev", interface]
            assert f"rate {rate} " in subprocess.check_output(shaped, text=True)


def test_slow_pairs_are_named_by_their_workers(links: ModuleType) -> None:
    import topology

    assert topology.settings("none,0-2", 3) == {"none": None, "0-2": (0, 2)}
    for wrong in ("a-b", "1-0", "0-3", ""):
        with pytest.raises(ValueError, match=f"--slow {wrong}: must be one of none, 0-1, 0-2, 1-2"):
            topology.settings(wrong, 3)
