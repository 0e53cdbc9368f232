"""Streams of files that can seek: parquet files, MosaicML's MDS shards, WebDataset's tars. Each file is a shard.

The libraries that read them are imported as a source is made. No file is read at its own offset, which forked processes
would share.
"""

from __future__ import annotations

import glob
import json
import mmap
import os
import re
import tarfile
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from kfuse.data.builtin import import_for
from kfuse.data.dataset import DataError
from kfuse.data.sources import Source

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Transform = Callable[[Any], Any]
_ROWS, _MOST_OPEN = 256, 128  # rows of a parquet file that are decoded together; such files that a process keeps open
_META = re.compile(r"__[^/]*__($|/)")  # members of a tar that webdataset leaves out


class _Files(Source):
    lengths: Sequence[int]

    def __init__(self, files: Sequence[str], lengths: Sequence[int], transform: Transform | None) -> None:
        """transform: of a sample; it may draw from the global generators."""
        self.files, self.lengths, self.shards, self.transform = files, lengths, len(files), transform

    def open(self, shard: int, position: int) -> Iterator[Any]:
        samples = self._read(shard, position) if position < self.lengths[shard] else iter(())
        return samples if self.transform is None else map(self.transform, samples)

    @abstractmethod
    def _read(self, shard: int, position: int) -> Iterator[Any]:
        """Returns an iterator over the samples from this one on, which is there."""


def _paths(given: Files, ending: str) -> list[str]:
    """Returns the files that are listed, in their order; those of a folder or a pattern by name. Raises DataError."""
    if isinstance(given, str | os.PathLike):
        text = os.path.expanduser(given)
        found = sorted(glob.glob(f"{glob.escape(text)}/*{ending}" if os.path.isdir(text) else text))
    else:
        found = [os.path.expanduser(file) for file in given]
    if missing := [file for file in found or [str(given)] if not os.path.isfile(file)]:
        allowed = f"a list of files, a folder of *{ending}, or a pattern such as data/*{ending}"
        raise DataError(f"{missing[0]}: no such file: must be {allowed}")
    return found


class ParquetSource(_Files):
    """Rows of parquet files, each a dictionary by column. Needs pyarrow.

    A number is a numpy scalar and a list of numbers, without nulls in it, an array `[N]` of the column's type. Anything
    else is what pyarrow makes of it in Python; null is None.
    """

    def __init__(self, files: Files, columns: Sequence[str] | None = None, transform: Transform | None = None) -> None:
        """files: a list, a folder or a pattern. Their footers are read. columns: None: those of the first file.

        transform: of a sample. Raises DataError.
        """
        import_for("pyarrow.parquet", "parquet", "pyarrow", "'kfuse[parquet]'")
        paths, lengths = _paths(files, ".parquet"), []
        self._columns = tuple(columns or ())
        for path in paths:
            table = _Table(path, self._columns)
            self._columns = table.columns
            lengths.append(table.starts[-1])
        super().__init__(paths, lengths, transform)

    def _read(self, shard: int, position: int) -> Iterator[Any]:
        file = self.files[shard]
        table = _table(file, self._columns, os.stat(file).st_mtime_ns)
        while position < self.lengths[shard]:
            rows = table.rows(position, self.block)
            for values in zip(*map(_values, rows.columns), strict=True):
                yield dict(zip(rows.schema.names, values, strict=True))
            position += len(rows)


class _Table:
    """An open parquet file, which keeps the batch of rows that it has decoded last."""

    def __init__(self, file: str, columns: tuple[str, ...]) -> None:
        import pyarrow.parquet

        try:
            self._file = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 16, pre_buffer=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{file}: must be a parquet file: {' '.join(str(error).split())}") from error
        names, groups = self._file.schema_arrow.names, range(self._file.num_row_groups)
        self.columns = columns or tuple(names)
        if wrong := [name for name in self.columns if name not in names]:
            raise DataError(f"{file}: has no column {wrong[0]}: must be of {', '.join(names)}")
        self.starts = [*accumulate((self._file.metadata.row_group(k).num_rows for k in groups), initial=0)]
        self._group, self._start, self._batches = -1, 0, iter(())
        self._batch: Any = []

    def rows(self, position: int, count: int) -> Any:
        """Returns at most `count` rows from `position` on, a RecordBatch. Reads on, or from the row group's start."""
        group = bisect_right(self.starts, position) - 1
        if group != self._group or position < self._start:
            self._group, self._start, self._batch = group, self.starts[group], []
            self._batches = self._file.iter_batches(_ROWS, [group], self.columns, use_threads=False)
        while position >= self._start + len(self._batch):
            self._start, self._batch = self._start + len(self._batch), next(self._batches)
        return self._batch.slice(position - self._start, count)


# Opening it again reads on where it was: one stream of a process reads a file. mtime_ns: of a file written anew.
_table = lru_cache(_MOST_OPEN)(lambda file, columns, mtime_ns: _Table(file, columns))


def _values(column: Any) -> list[Any]:
    """Returns the values of a pyarrow column: see `ParquetSource`. Arrays are copies, which may be written to."""
    from pyarrow import types

    kind = column.type
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    number = kind.value_type if listed else kind
    if not (types.is_integer(number) or types.is_floating(number) or types.is_boolean(number)):
        return list(column.to_pylist())
    if listed:
        inner = (item.values for item in column)
        return [part and (part.to_pylist() if part.null_count else np.array(part.to_numpy(False))) for part in inner]
    make = number.to_pandas_dtype()
    return [None if value is None else make(value) for value in column.to_pylist()]


class MDSSource(_Files):
    """Samples of MosaicML's MDS shards, dictionaries as `streaming` decodes them. Needs mosaicml-streaming."""

    def __init__(self, folder: str | os.PathLike[str], transform: Transform | None = None) -> None:
        """folder: has index.json and the shards, uncompressed. transform: of a sample. Raises DataError, also for a
        column of pickles, which could run any code.
        """
        module = import_for("streaming.base.format.mds.reader", "mds", "mosaicml-streaming", "'kfuse[mds]'")
        path = Path(folder).expanduser()
        try:
            index = json.loads((path / "index.json").read_text())["shards"]
            self._readers = [module.MDSReader.from_json(str(path), None, shard) for shard in index]
            for reader in self._readers:
                reader.validate(allow_unsafe_types=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(f"{path}: must be a folder with MDS shards and their index.json: {said}") from error
        files = [str(path / reader.raw_data.basename) for reader in self._readers]
        if missing := [file for file in files if not os.path.isfile(file)]:
            raise DataError(f"{missing[0]}: no such file: shards must be there, uncompressed")
        super().__init__(files, [len(reader) for reader in self._readers], transform)

    def _read(self, shard: int, position: int) -> Iterator[Any]:
        return (self._readers[shard][at] for at in range(position, self.lengths[shard]))


class WebDatasetSource(_Files):
    """Samples of WebDataset's tars: dictionaries with `__key__` and the members by extension. Needs webdataset."""

    def __init__(self, tars: Files, decode: Any = (), transform: Transform | None = None) -> None:
        """tars: a list, a folder or a pattern, also with braces, {00..31}. The headers of all members are read.

        decode: handlers of webdataset's `decode`, such as "torchrgb"; None: members stay bytes. transform: of a sample.
        Raises DataError.
        """
        web = import_for("webdataset.autodecode", "webdataset", "webdataset", "'kfuse[webdataset]'")
        if isinstance(tars, str) and "{" in tars:
            tars = list(import_for("braceexpand", "webdataset", "braceexpand", "braceexpand").braceexpand(tars))
        handlers = [decode] if isinstance(decode, str) or callable(decode) else decode
        made = [web.ImageHandler(each) if isinstance(each, str) else each for each in handlers or ()]
        self._decode = None if decode is None else web.Decoder(made)
        paths = _paths(tars, ".tar")
        self._starts = [_starts(path) for path in paths]
        super().__init__(paths, [len(starts) for starts in self._starts], transform)

    def _read(self, shard: int, position: int) -> Iterator[Any]:
        from webdataset.tariterators import group_by_keys, tar_file_iterator

        with open(self.files[shard], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as tar:
            tar.seek(self._starts[shard][position])
            members = ({**member, "__url__": None} for member in tar_file_iterator(tar))
            for sample in group_by_keys(members):
                del sample["__url__"]
                yield sample if self._decode is None else self._decode(sample)


def _starts(file: str) -> np.ndarray:
    """Returns where each sample of a tar starts, int64: the place of its first member's header. Raises DataError."""
    from webdataset.tariterators import group_by_keys

    try:
        with tarfile.open(file, "r:") as tar:
            named = ((member.name, member.offset) for member in tar if member.isreg() and not _META.match(member.name))
            members = ({"fname": name, "data": place, "__url__": None} for name, place in named)
            places = [min(v for v in sample.values() if isinstance(v, int)) for sample in group_by_keys(members)]
    except (tarfile.TarError, ValueError, OSError) as error:
        said = error if isinstance(error, OSError) else error.args[0]  # webdataset adds to the arguments
        raise DataError(f"{file}: must be an uncompressed tar of WebDataset samples: {said}") from error
    return np.array(places, np.int64)
