"""The manifests for Kubernetes: valid by its schemas, and their commands train, here as processes of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from elastic_job import DEADLINE_S, Job, wait_until

TEXT = (Path(__file__).parents[2] / "deploy" / "kubernetes.yaml").read_text()


def test_manifests_are_valid() -> None:
    for part in yaml.safe_load_all(TEXT):
        kubernetes_validate.validate(part, "1.34", strict=True)


def test_their_commands_train(tmp_path: Path) -> None:
    """Two agents, with the manifests' script, probe and secret, as a Secret's file looks in a pod."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    text = TEXT.replace("$(POD_IP):29400", address).replace("kfuse:29400", address)
    for folder in ("runs", "secret", "job"):
        text = text.replace(f"/{folder}/", f"{tmp_path}/{folder}/")
        (tmp_path / folder).mkdir()
    parts: dict[str, Any] = {f"{part['kind']} {part['metadata']['name']}": part for part in yaml.safe_load_all(text)}
    secret, token = parts["Secret kfuse-token"]["stringData"]["job.token"], tmp_path / "secret" / "job.token"
    (tmp_path / "job" / "train.py").write_text(parts["ConfigMap kfuse-script"]["data"]["train.py"])
    [supervisor] = parts["Job kfuse"]["spec"]["template"]["spec"]["containers"]
    [agent] = parts["Deployment kfuse-agent"]["spec"]["template"]["spec"]["containers"]
    modules = {"kfuse": "kfuse", "kfuse-run": "kfuse.cli.kfuse_run"}
    log = tmp_path / "log"

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as stream:
            return subprocess.Popen([sys.executable, "-m", modules[name], *words], stdout=stream, stderr=stream)

    token.write_text(secret)
    token.chmod(0o440)
    if os.geteuid() == 0:
        os.chown(token, 1, 1)
    assert start(*supervisor["command"]).wait(DEADLINE_S) == 2, "the secret must be replaced"
    token.write_text(secret * 3)
    started = [start(*container["command"]) for container in (supervisor, agent, agent)]
    try:
        job = Job(tmp_path / "runs" / "a")
        wait_until("steps", lambda: job.directory.exists() and len(job.metrics) > 5)
        assert start(*supervisor["livenessProbe"]["exec"]["command"]).wait(DEADLINE_S) == 0
        assert [process.wait(DEADLINE_S) for process in started] == [0, 0, 0], log.read_text()
    finally:
        for process in started:
            process.kill()
    assert job.summary["workers"] == 4
    assert len([*(tmp_path / "runs" / "a" / "logs").glob("worker-*.log")]) == 4
