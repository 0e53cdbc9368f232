"""CPU time of a sample from files, beside the libraries' own iteration: python benchmarks/streams.py FOLDER

Three files of 8,000 samples of each format: a text of 500 bytes, 128 token numbers, a class. A worker of two takes
every other micro-batch of 16. Medians of 5 interleaved rounds, and the range. Needs the test-frameworks environment.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import webdataset as wds

if find_spec("torchvision") is None:  # `streaming` imports it, and uses none of it here
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        module = sys.modules[name] = ModuleType(name)
        module.__dict__.update(__spec__=ModuleSpec(name, None), VisionDataset=object, to_tensor=None)
from streaming import LocalDataset, MDSWriter
from streaming.base.util import merge_index

from kfuse.data import MDSSource, ParquetSource, WebDatasetSource
from kfuse.data.sources import SourceStream

FILES, SAMPLES, MICRO, ROUNDS = 3, 8000, 16, 5


def write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for kind in ("parquet", "mds", "tar"):
        (folder / kind).mkdir(parents=True)
    for shard in range(FILES):
        tokens = rng.integers(0, 50_000, (SAMPLES, 128), dtype=np.int32)
        texts = ["".join(map(chr, row)) for row in rng.integers(97, 123, (SAMPLES, 500))]
        table = {"text": texts, "tokens": [*tokens], "label": pa.array(np.arange(SAMPLES) % 10)}
        pq.write_table(pa.table(table), folder / "parquet" / f"{shard}.parquet", row_group_size=2000)
        columns = {"text": "str", "tokens": "ndarray:int32:128", "label": "int"}
        with MDSWriter(out=str(folder / "mds" / str(shard)), columns=columns) as out:
            for k in range(SAMPLES):
                out.write({"text": texts[k], "tokens": tokens[k], "label": k % 10})
        with wds.TarWriter(str(folder / "tar" / f"{shard}.tar")) as tar:
            for k in range(SAMPLES):
                tar.write({"__key__": f"{k:06d}", "txt": texts[k], "npy": tokens[k], "cls": k % 10})
    merge_index(str(folder / "mds"), keep_local=True)


def read(source: Any, worker: int | None) -> Iterator[Any]:
    stream = SourceStream(source)
    first, apart = (0, MICRO) if worker is None else (worker * MICRO, 2 * MICRO)
    for start in range(first, sum(source.lengths), apart):
        for number in range(start, start + MICRO):
            yield stream.sample(number, lambda number: None)


def parquet_itself(folder: Path) -> Iterator[Any]:
    for file in sorted((folder / "parquet").iterdir()):
        for batch in pq.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()


def mds_itself(folder: Path) -> Iterator[Any]:
    data = LocalDataset(str(folder / "mds"))
    return (data[k] for k in range(len(data)))


def tars_themselves(folder: Path) -> Iterator[Any]:
    return iter(wds.WebDataset([str(f) for f in sorted((folder / "tar").iterdir())], shardshuffle=False).decode())


def main(folder: Path) -> None:
    if not folder.exists():
        write(folder)
    ways: dict[str, Callable[[], Iterator[Any]]] = {}
    for kind, make, itself in (
        ("parquet", lambda: ParquetSource(folder / "parquet"), parquet_itself),
        ("mds", lambda: MDSSource(folder / "mds"), mds_itself),
        ("webdataset", lambda: WebDatasetSource(folder / "tar"), tars_themselves),
    ):
        began = time.process_time()
        source = make()
        print(f"{kind}: made in {(time.process_time() - began) * 1e6 / FILES / SAMPLES:.2f} us a sample")
        ways |= {
            f"{kind}, itself": lambda itself=itself: itself(folder),
            f"{kind}, all": lambda source=source: read(source, None),
            f"{kind}, worker 1 of 2": lambda source=source: read(source, 1),
        }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, make in ways.items():
            began = time.process_time()
            count = sum(1 for _ in make())
            found[way].append((time.process_time() - began) / count * 1e6)
    for way, times in found.items():
        print(f"{way}: {statistics.median(times):.1f} us a sample ({min(times):.1f}-{max(times):.1f})")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
