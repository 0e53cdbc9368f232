"""TensorBoard's event file of a run."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kfuse.observe.sinks import Groups, Sink, numbers


class Board(Sink):
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
        self.name = str(path)
        path.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file: BinaryIO = (path / name).open("ab", buffering=0)
        self._waiting: list[bytes] = []
        self._crc: Callable[[bytes], int] = value
        # Of each group its latest keys, the event with them, and that event's values: to make them takes most time.
        self._newest: dict[str, Any] = {}
        self._add(event_pb2.Event(file_version="brain.Event:2"))

    def _band(self) -> Any:
        """The layout of the tab Custom Scalars: the noise scale as a line within its interval."""
        from tensorboard.compat.proto import tensor_pb2
        from tensorboard.plugins.custom_scalar import layout_pb2 as layouts

        line, low, high = (f"train/noise_scale{end}" for end in ("", "_low", "_high"))
        series = layouts.MarginChartContent.Series(value=line, lower=low, upper=high)
        chart = layouts.Chart(title="noise scale", margin=layouts.MarginChartContent(series=[series]))
        layout = layouts.Layout(category=[layouts.Category(title="kfuse", chart=[chart])])
        tensor = tensor_pb2.TensorProto(dtype="DT_STRING", string_val=[layout.SerializeToString()])
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="custom_scalars")
        about = self._summary.SummaryMetadata(plugin_data=plugin)
        return self._summary.Summary.Value(tag="custom_scalars__config__", tensor=tensor, metadata=about)

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._waiting += length, self._checksum(length), data, self._checksum(data)

    def _checksum(self, data: bytes) -> bytes:
        """The masked CRC-32C of TensorFlow's records, four bytes."""
        crc = self._crc(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    def rewind(self, step: int) -> None:
        """TensorBoard drops what the files have of `step` and later steps: it comes again."""
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(self._event.Event(step=step, session_log=log))
        self._add(
            self._event.Event(step=step, summary=self._summary.Summary(value=[self._band()]))
        )  # it is dropped too

    def log(self, groups: Groups, step: int) -> None:
        for group, record in groups.items():
            figures = numbers(record)
            keys, event, values = self._newest.get(group, (None, None, []))
            if is_new := keys != (*figures,):
                tags = [f"{group}/{key}" for key in figures]
                values = [self._summary.Summary.Value(tag=tag, metadata=self._scalar) for tag in tags]
                event = self._event.Event(summary=self._summary.Summary(value=values))
                values = list(event.summary.value)
                self._newest[group] = (*figures,), event, values
            for value, number in zip(values, figures.values(), strict=True):
                value.simple_value = number
            event.step = step
            self._add(event)
            if is_new:
                for value in values:
                    value.ClearField("metadata")

    def write(self) -> None:
        if self._waiting:
            self._file.write(b"".join(self._waiting))
            self._waiting.clear()

    def close(self, summary: Mapping[str, Any]) -> None:
        self._file.close()
