"""TensorBoard's event file of a run."""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_MOST = 3.4e38  # of fp32, in which TensorBoard keeps numbers


class Board:
    """An event file. TensorBoard is imported when it is made.

    Not through TensorBoard's own writer: its thread takes twice the CPU time, and blocks who adds more than ten events.
    Nor through its `RecordWriter`, whose checksums in Python take 200 times as long.
    """

    def __init__(self, path: Path) -> None:
        from google_crc32c import value
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        # Without a plugin's name TensorBoard warns of each scalar. It needs to be told once.
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="scalars")
        self._scalar: Any = summary_pb2.SummaryMetadata(plugin_data=plugin)
        path.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file: BinaryIO = (path / name).open("ab", buffering=0)
        self._waiting: list[bytes] = []
        self._crc: Callable[[bytes], int] = value
        # Of each group its latest keys and types, and how such an event's bytes are packed: messages take most time.
        self._newest: dict[str, Any] = {}
        self._add(file_version="brain.Event:2")

    def _add(self, **content: Any) -> None:
        self._append(self._event.Event(wall_time=time.time(), **content).SerializeToString())

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._waiting += length, self._checksum(length), event, self._checksum(event)

    def _checksum(self, data: bytes) -> bytes:
        """The masked CRC-32C of TensorFlow's records, four bytes."""
        crc = self._crc(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    def rewind(self, step: int) -> None:
        """TensorBoard drops what the files have of `step` and later steps: it comes again."""
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(step=step, session_log=log)

    def scalars(self, group: str, record: Mapping[str, Any], step: int) -> None:
        """Adds an event with the record's numbers, but for those that fp32 does not hold."""
        event = self._event.Event(wall_time=time.time(), step=step)
        shape = (*record, *map(type, record.values()))
        known, keys, packed, parts = self._newest.get(group, (None, [], None, []))
        if shape == known:
            parts[1::2] = numbers = [record[key] for key in keys]
            if math.hypot(*numbers) < _MOST:  # then each of them is
                self._append(event.SerializeToString() + packed.pack(*parts))
                return
        keys = [key for key, value in record.items() if key != "step" and _is_number(value)]
        kind = self._summary.Summary
        values = [kind.Value(tag=f"{group}/{key}", simple_value=record[key]) for key in keys]
        # The bytes of such an event: each value ends with its number, in four bytes.
        parts = [kind(value=[value]).SerializeToString()[:-4] for value in values]
        summary = self._event.Event(summary=kind(value=values)).SerializeToString()
        parts[:1] = [summary[: len(summary) - sum(len(part) + 4 for part in parts)] + part for part in parts[:1]]
        packed = struct.Struct("<" + "".join(f"{len(part)}sf" for part in parts))
        self._newest[group] = shape, keys, packed, [each for part in parts for each in (part, 0.0)]
        for value in values:
            value.metadata.CopyFrom(self._scalar)
        event.summary.value.extend(values)
        self._append(event.SerializeToString())

    def write(self) -> None:
        """Writes the waiting events. Raises OSError."""
        if self._waiting:
            self._file.write(b"".join(self._waiting))
            self._waiting.clear()

    def close(self) -> None:
        self._file.close()


def _is_number(value: object) -> bool:
    return (type(value) is int or isinstance(value, float)) and -_MOST < value < _MOST
