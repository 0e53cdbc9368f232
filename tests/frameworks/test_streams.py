"""Parquet files, MDS shards and WebDataset's tars: every sample of an epoch once, on workers that come and go.

python test_streams.py KIND FOLDER: what a worker of the job runs.
"""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import pickle
import sys
import tarfile
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chaos import Chaos
from elastic_job import changes, events, read_lines, run_script
from hypothesis import given
from hypothesis import strategies as st
from limits import limits

import kfuse as kf
from kfuse.data import DataError, MDSSource, ParquetSource, Source, WebDatasetSource
from kfuse.data.sources import SourceStream
from kfuse.train.evaluation import params_sha256

if find_spec("torchvision") is None:  # `streaming` imports it, whose wheels need a CUDA build of torch
    stub, names = ModuleType("torchvision"), ["", ".datasets", ".transforms", ".transforms.functional"]
    stub.__dict__.update(__spec__=ModuleSpec("torchvision", None), VisionDataset=object, to_tensor=None)
    sys.modules.update({f"torchvision{name}": stub for name in names})
from streaming import MDSWriter
from streaming.base.util import merge_index
from webdataset import TarWriter

for name in [name for name, module in sys.modules.items() if "stub" in globals() and module is stub]:
    del sys.modules[name]

KINDS = ["parquet", "mds", "webdataset"]
LENGTHS, SAMPLES, BATCH, STEPS = [37, 18, 5], 60, 12, 65


def write(kind: str, folder: Path) -> Path:
    """Shards of these lengths, in row groups of 8; the samples are numbered by `key`."""
    folder.mkdir()
    keys = [[*range(sum(LENGTHS[:shard]), sum(LENGTHS[: shard + 1]))] for shard in range(len(LENGTHS))]
    for shard, of_shard in enumerate(keys):
        if kind == "parquet":
            columns: Any = {"key": of_shard, "x": [[k, 1.5] for k in of_shard], "name": [f"n{k}" for k in of_shard]}
            pq.write_table(pa.table(columns), folder / f"{shard}.parquet", row_group_size=8)
        elif kind == "mds":
            with MDSWriter(
                out=f"{folder}/{shard}", columns={"key": "int", "x": "ndarray:float64", "name": "str"}
            ) as out:
                for k in of_shard:
                    out.write({"key": k, "x": np.array([k, 1.5]), "name": "n" * k})
        else:
            with TarWriter(str(folder / f"{shard}.tar")) as tar:
                for k in of_shard:
                    tar.write({"__key__": f"a/{k:03d}", "cls": k, "x.npy": np.array([k, 1.5]), "long" * 40: b"z" * k})
    if kind == "mds":
        merge_index(str(folder), keep_local=True)
    return folder


def key_of(sample: dict[str, Any]) -> tuple[int, float]:
    return int(sample["key" if "key" in sample else "cls"]), float(torch.rand(()))


def source_of(kind: str, folder: Path, transform: Any = key_of) -> Source:
    make: Any = {"parquet": ParquetSource, "mds": MDSSource, "webdataset": WebDatasetSource}[kind]
    source: Source = make(folder, transform=transform)
    assert source.lengths == LENGTHS
    source.block = 4
    return source


def train(kind: str, folder: Path, policy: kf.BasePolicy | None = None, **more: Any) -> str:
    """Returns the parameters' hash. FOLDER keeps which samples each step has used, also those that were lost."""
    kf.init(comm_reproducible=True)
    torch.manual_seed(0)
    opt = kf.FusedSGD((model := torch.nn.Linear(1, 1)).parameters(), lr=1e-3)
    given: Any = {"batch_size": BATCH, "micro_batch": 2, "steps": STEPS, **more}
    for step in kf.DataLoader(model, source_of(kind, folder / "data"), opt, policy, **given):
        for keys, noise in step:
            with open(folder / "used", "a") as file:
                file.write(json.dumps({"step": step.number, "keys": keys.tolist()}) + "\n")
            step.loss = (model(keys[:, None] / SAMPLES) - noise).square().mean()
            step.loss.backward()
        opt.step()
        opt.zero_grad()
    return params_sha256(model)


def main(kind: str, folder: Path) -> None:
    happens = events("14 forward 1 of 3, 56 forward 0 by kill_all of 2")
    plan = {"phases": changes("2:3 24:1 40:2"), "gates": changes("11:3 36:1 52:2"), "adaptive": False}
    kept = {"checkpoint_dir": folder / "kept", "checkpoint_every_steps": 5, "checkpoint_resume": "auto"}
    train(kind, folder, Chaos(str(folder / "events"), happens, **plan), num_workers=1, **kept)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_comes_once_an_epoch_through_resizes_losses_and_a_resume(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path / "data")
    job = run_script(tmp_path / "run", limits(2, 1, 3, script=True), __file__, kind, str(tmp_path))
    assert job.error is None, job.told()
    assert {len(view["workers"]) for view in job.views} == {1, 2, 3} and job.of_kind("resumed"), job.told()
    assert len(list(tmp_path.glob("events/event-*"))) == 2
    lines = read_lines(tmp_path / "used")  # a step that was lost is there again, perhaps by other workers
    for first in range(0, STEPS, SAMPLES // BATCH):
        epoch = [{k for line in lines if line["step"] == first + at for k in line["keys"]} for at in range(5)]
        assert sorted(itertools.chain(*epoch)) == [*range(SAMPLES)]
    assert job.summary["params_sha256"] == train(kind, tmp_path)


@pytest.fixture(scope="module", params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return source_of(request.param, write(request.param, tmp_path_factory.mktemp("made") / "data"))


@given(places=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=12))
def test_any_place_has_its_samples(source: Source, places: list[tuple[int, int, int]]) -> None:
    """Also with iterators that go on beside others, in a forked process and from a pickle."""
    kept, expected = [], []
    for shard, position, count in places:
        kept.append(source.open(shard, position))
        first = sum(LENGTHS[:shard])
        keys = [*range(first + position, first + LENGTHS[shard])]
        assert [k for k, _ in (next(kept[-1], (None, 0)) for _ in range(count)) if k is not None] == keys[:count]
        expected.append(keys[count:])
    assert [[k for k, _ in iterator] for iterator in kept] == expected


def test_a_fork_and_a_pickle_read_on_alone(source: Source) -> None:
    shared = source.open(0, 3)
    next(shared)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=lambda: theirs.send([k for k, _ in shared]))
    process.start()
    assert [k for k, _ in shared] == [*range(4, 37)] == ours.recv()
    process.join()
    assert [k for k, _ in pickle.loads(pickle.dumps(source)).open(1, 15)] == [52, 53, 54]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_what_default_collate_takes(kind: str, tmp_path: Path) -> None:
    batch = SourceStream(source_of(kind, write(kind, tmp_path / "data"), None)).fetch(np.arange(3, 5))  # two shards
    key = "cls" if kind == "webdataset" else "key"
    assert batch[key].tolist() == [3, 37] and batch[key].dtype == torch.int64
    assert batch["x.npy" if kind == "webdataset" else "x"].tolist() == [[3, 1.5], [37, 1.5]]


def test_columns_keep_their_types(tmp_path: Path) -> None:
    columns = {"a": pa.array([1, None, 3], pa.int8()), "b": pa.array([1.5, 2, 3], pa.float32())}
    columns |= {"c": [True, False, True]}
    columns |= {
        "d": pa.array([[1, 2], None, [3, None]], pa.list_(pa.int16())),
        "e": ["x", None, "y"],
        "f": [[["z"]], [], []],
    }
    pq.write_table(pa.table(columns), tmp_path / "one.parquet")
    rows = [*ParquetSource(str(tmp_path / "*.parquet"), ["b", "a", "c", "d", "e", "f"]).open(0, 0)]
    assert [*rows[0]] == [*"bacdef"] and rows[1] == {"b": 2, "a": None, "c": False, "d": None, "e": None, "f": []}
    assert [type(rows[0][name]) for name in "abc"] == [np.int8, np.float32, np.bool_] and rows[0]["f"] == [["z"]]
    assert rows[2]["d"] == [3, None]
    assert rows[0]["d"].dtype == np.int16 and rows[0]["d"].flags.writeable
    assert torch.utils.data.default_collate([rows[0]["b"], rows[1]["b"]]).dtype == torch.float32


def test_wrong_files_are_refused_in_one_line(tmp_path: Path) -> None:
    parquet, mds, tars = (write(kind, tmp_path / kind) for kind in KINDS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("a text\n" * 200)
    pq.write_table(pa.table({"other": [1]}), tmp_path / "other.parquet")
    index = json.loads((mds / "index.json").read_text())
    for name, change in {"pickles": {"column_encodings": ["pkl", "int", "str"]}, "version": {"version": 1}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.json").write_text(json.dumps({"shards": [index["shards"][0] | change]}))
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        for name in ("a.txt", "a.txt"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with tarfile.open(tmp_path / "none.tar", "w:gz") as tar:
        tar.add(tmp_path / "text")
    (mds / "1/shard.00000.mds").unlink()
    wrong: list[tuple[Any, Any, str]] = [
        (ParquetSource, tmp_path / "empty", r"empty: no such file: must be a list of files, a folder of \*.parquet"),
        (ParquetSource, [parquet / "0.parquet", parquet / "9.parquet"], "9.parquet: no such file"),
        (ParquetSource, [], "no such file"),
        (ParquetSource, tmp_path / "text", "text: must be a parquet file"),
        (ParquetSource, [parquet / "0.parquet", tmp_path / "other.parquet"], "other.parquet: has no column key: must"),
        (MDSSource, tmp_path / "empty", "empty: must be a folder with MDS shards and their index.json: File"),
        (MDSSource, tmp_path / "pickles", "unsafe type: pkl"),
        (MDSSource, tmp_path / "version", "version: 1"),
        (MDSSource, mds, "1/shard.00000.mds: no such file: shards must be there, uncompressed"),
        (WebDatasetSource, str(tars / "{0..3}.tar"), "3.tar: no such file"),
        (WebDatasetSource, tmp_path / "text", "text: must be an uncompressed tar of WebDataset samples"),
        (WebDatasetSource, tmp_path / "none.tar", "none.tar: must be an uncompressed tar"),
        (WebDatasetSource, tmp_path / "twice.tar", "twice.tar: must be .*: a.txt: duplicate file name"),
    ]
    for make, given_, said in wrong:
        with pytest.raises(DataError, match=said) as caught:
            make(given_)
        assert "\n" not in str(caught.value)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
