"""The installed package has the right modules and data, and it is the one that the tests import."""

from __future__ import annotations

import importlib.metadata
import os
import sysconfig
from pathlib import Path

import pytest

import kfuse


@pytest.mark.skipif("KFUSE_TEST_INSTALLED" not in os.environ, reason="`make test` checks the installed wheel")
def test_the_installed_wheel_is_tested_and_holds_kfuse_alone_with_its_configs() -> None:
    assert kfuse.__file__ is not None
    assert Path(kfuse.__file__).is_relative_to(sysconfig.get_path("purelib"))
    files = importlib.metadata.files("kfuse")
    assert files is not None
    names = {file.as_posix() for file in files}
    top = {name.split("/")[0] for name in names if not name.startswith("..")}
    assert {name for name in top if not name.endswith(".dist-info")} == {"kfuse"}
    assert {
        "kfuse/configs/config.yaml",
        "kfuse/configs/model/mlp.yaml",
        "kfuse/kernels/__init__.py",
        "kfuse/comm/transports/__init__.py",
        "kfuse/py.typed",
    } <= names
