"""kfuse looks up what it uses of torch and Triton beyond their public interfaces, and says in one line what is gone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import kfuse
from kfuse.kernels.private_names import NAMES, TESTED, need

SOURCES, ROOT = Path(kfuse.__file__).parent, Path(__file__).parent.parent
OTHERS = ("transformers", "accelerate", "lightning", "ray")  # modules with private names of other libraries


def trees() -> list[ast.Module]:
    """kernels/ and comm/ are symlinks in a checkout, which rglob passes by."""
    paths = {path.resolve() for part in (".", "kernels", "comm") for path in (SOURCES / part).rglob("*.py")}
    return [ast.parse(path.read_text()) for path in sorted(paths) if not path.stem.startswith(OTHERS)]


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def imports(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for."""
    found = {}
    for node in ast.walk(tree):
        for each in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            whole = f"{node.module}.{each.name}" if isinstance(node, ast.ImportFrom) else each.name
            found[each.asname or whole.rpartition(".")[2]] = whole
            if isinstance(node, ast.Import) and not each.asname:
                found[whole.partition(".")[0]] = whole.partition(".")[0]
    return found


def dotted(node: ast.expr) -> tuple[str, str]:
    """The name at the start of a chain of attributes, "" where it is another expression, and the attributes."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else ""), ".".join(parts)


def uses(tree: ast.Module) -> set[str]:
    """The private names of torch and Triton that a module uses: dotted, or the attribute alone of any other object."""
    imported = imports(tree)
    found = [*imported.values()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, rest = dotted(node)
            if root in imported:
                found.append(f"{imported[root]}.{rest}")
            elif root not in ("self", "cls"):
                found.append(node.attr)
    return {name for name in found if private(name) and (name.startswith(("torch.", "triton.")) or "." not in name)}


def own(tree: ast.Module) -> set[str]:
    """The names that a module itself defines."""
    nodes = list(ast.walk(tree))
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return found | {node.attr for node in stored if dotted(node) == ("self", node.attr)}


def needed(tree: ast.Module) -> set[str]:
    """The names that a module looks up where it uses them."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and dotted(node.func) == ("need", "")]
    texts = [part.value for call in calls for part in ast.walk(call.args[0]) if isinstance(part, ast.Constant)]
    return {name for text in texts if isinstance(text, str) for name in text.split()}


def test_every_private_name_is_looked_up() -> None:
    parsed = trees()
    assert len(parsed) > 150
    listed = {*NAMES.split()}.union(*map(needed, parsed))
    known = {part for name in listed for part in name.split(".")}.union(*map(own, parsed))
    used = set[str]().union(*map(uses, parsed))
    assert {"torch._C._set_grad_enabled", "torch.utils._pytree.tree_flatten", "_set_default_timeout"} <= used
    assert not {
        name for name in used if name not in known and not any(f"{each}.".startswith(f"{name}.") for each in listed)
    }


def test_a_name_that_is_gone_is_named_before_training() -> None:
    script = "import torch; del torch._C._current_autograd_node; import kfuse; kfuse.fit"
    done = subprocess.run([sys.executable, "-c", script], cwd=SOURCES.parent, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        f"RuntimeError: torch {torch.__version__}: torch._C._current_autograd_node, which kfuse uses, is not there: "
        f"kfuse was tested with {TESTED}"
    )


def test_what_only_an_instance_has_is_looked_up_on_it() -> None:
    need("torch.nn.Linear._parameters", of=torch.nn.Linear(1, 1))
    need("torch.optim.Optimizer._optimizer_step_pre_hooks torch.optim.optimizer._global_optimizer_pre_hooks")
    with pytest.raises(RuntimeError, match=r"^torch \S+: torch\.nn\.Linear\._gone, which kfuse uses, is not there: "):
        need("torch.nn.Linear._parameters torch.nn.Linear._gone", of=torch.nn.Linear(1, 1))


def test_the_versions_that_were_tested_are_those_of_readme_of_pip_and_of_constraints() -> None:
    torchs_first, torchs_last, tritons_first, tritons_last = re.findall(r"\d+\.\d+\.\d+", TESTED)
    said = f"torch {torchs_first} and {torchs_last}, Triton {tritons_first} to {tritons_last}"
    assert said in (ROOT / "README.md").read_text()
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"torch>={torchs_first.rpartition('.')[0]}", f"triton>={tritons_first}"} <= {
        each.partition(";")[0] for each in required
    }
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert {f"torch=={torchs_first}", f"triton=={tritons_first}"} <= {*pinned}
