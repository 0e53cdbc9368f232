"""`import kfuse` needs torch and numpy only: everything else is imported by the part that uses it, when it does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import kfuse as kf

MOST_MODULES, MOST_LINES = 79, 15_800  # 200 of them: where workers may have several processes

OPTIONAL = ("hydra", "omegaconf", "rich", "sklearn", "triton", "tensorboard", "matplotlib", "PIL", "ray")

HIDE = f"""
import importlib.util, sys

class Hiding:
    # A finder that finds what the real one does, except the optional packages: as if they were not installed.
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {OPTIONAL} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
found = [name for name in {OPTIONAL} if importlib.util.find_spec(name)]
assert not found, found
"""

OURS = """
import torch
import kfuse as kf

net = torch.nn.Linear(5, 2)
opt = kf.FusedAdamW(net.parameters(), lr=0.1)
kf.fit(net, (torch.randn(8, 5), torch.randint(0, 2, (8,))), opt, epochs=2, batch_size=4, micro_batch=2)
opt.load_state_dict(opt.state_dict())
opt.zero_grad()
"""

CHECK = """
import hydra
from kfuse.cli.check import prepare, validate

with hydra.initialize_config_module("kfuse.configs", version_base="1.3"):
    config = hydra.compose("config", [])
prepare(config, [])
validate(config)
"""

IMPORT_ALONE = """
import sys
import numpy, torch

before = set(sys.modules)
import kfuse

new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names) - {"kfuse", "torch", "numpy"}))
"""


def run(script: str) -> str:
    """What `script` prints, in a fresh interpreter from which this package can be imported as from here."""
    spec = importlib.util.find_spec("kfuse")
    assert spec is not None and spec.origin is not None
    paths = [str(Path(spec.origin).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(done.stderr, pytrace=False)
    return done.stdout


@pytest.mark.full
def test_kfuse_trains_where_nothing_optional_is_installed() -> None:
    run(HIDE + OURS)


def test_importing_kfuse_imports_torch_and_numpy_alone() -> None:
    """Installed or not: what a script does not use must not cost it time, nor fail it."""
    for name in ("hydra", "rich", "sklearn", "tensorboard"):
        assert importlib.util.find_spec(name) is not None, f"{name} is not installed: this test would see nothing"
    assert run(IMPORT_ALONE).split() == []


def test_a_worker_boots_without_torchs_compiler_and_scipy() -> None:
    """torch's own optimizers import the compiler as they are made, and that takes longer than torch itself."""
    assert run(CHECK + OURS + "import sys\nprint(*{'torch._dynamo', 'scipy'} & set(sys.modules))").split() == []


def test_kfuse_alone_loads_nothing_and_a_name_what_it_needs() -> None:
    listing = "import sys, kfuse\n{}\nprint(*(name for name in sys.modules if name.startswith(('kfuse.', 'torch'))))"
    assert run(listing.format("")).split() == ["kfuse.version"]
    loaded = run(listing.format("kfuse.Optimizer")).split()
    parsing = {f"kfuse.settings.{name}" for name in ("instantiate", "messages", "schema")}
    assert not {"kfuse.data", "kfuse.tools", "kfuse.cli", *parsing} & set(loaded)
    assert not [name for name in loaded if name.startswith("kfuse.policies.") and name != "kfuse.policies.signals"]


def test_a_wrong_override_is_refused_without_torch() -> None:
    main = "import sys\nsys.argv = ['kfuse', 'batch.size=0']\nfrom kfuse.cli.app import main\nstatus = main()\n"
    assert run(main + "print(status, 'torch' in sys.modules)") == "2 False\n"


LOADED = """
import os
import sys

import torch
import kfuse as kf

kf.init(comm_schedule="all_to_all")  # else times of messages decide, and the transports are of different lengths
opt = kf.Optimizer(torch.optim.SGD((net := torch.nn.Linear(5, 3)).parameters(), lr=0.1))
kf.fit(net, (torch.randn(64, 5), torch.randint(0, 3, (64,))), opt, epochs=1, batch_size=16)
assert kf.size() == 2
files = {os.path.realpath(m.__file__) for name, m in sys.modules.items() if name.partition(".")[0] == "kfuse"}
print(f"{len(files)} modules, {sum(len(open(file).readlines()) for file in files)} lines", flush=True)
"""


@pytest.mark.full
def test_what_a_worker_of_a_script_loads(tmp_path: Path) -> None:
    """A bound on what must be read to follow a training of two workers; raise it for a reason only."""
    (tmp_path / "train.py").write_text(LOADED)
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--workers", "2", "--run-dir", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    found = re.findall(r"(\d+) modules, (\d+) lines", done.stdout)
    assert found and int(found[0][0]) <= MOST_MODULES and int(found[0][1]) <= MOST_LINES, (found, done.stderr)


@pytest.mark.skipif("KFUSE_TEST_INSTALLED" not in os.environ, reason="`make test` checks the installed wheel")
def test_the_installed_wheel_is_tested_and_holds_kfuse_alone_with_its_configs() -> None:
    assert Path(str(kf.__file__)).is_relative_to(sysconfig.get_path("purelib"))
    names = {file.as_posix() for file in importlib.metadata.files("kfuse") or []}
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name and name[:2] != ".."} == {"kfuse"}
    assert {f"kfuse/{name}" for name in ("configs/model/mlp.yaml", "kernels/__init__.py", "py.typed")} <= names


def test_the_package_shows_its_public_names_and_nothing_else() -> None:
    assert dir(kf) == sorted(kf.__all__)
    assert {"fit", "DataLoader", "monitor"} <= set(dir(kf)) and "importlib" not in dir(kf)
