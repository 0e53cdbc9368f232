"""One cell for a hosted notebook with one GPU: paste it, put this repository's address in, run it; under nine minutes.

It runs the kernels and a training step of gpu.sh, prints the table, and leaves one JSON file, gpu_cuda.json, beside the
notebook: send it back with an issue. The notebook's own torch and Triton are used. The GPU needs compute capability 8.0
or later (A100, L4 and later; not T4).
"""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = "REPOSITORY"  # this repository's address
PARTS = ["kernels are compiled", "kernels are right", "kernels beside their peers", "a training step"]

checkout = Path("kfuse-checkout")
if not checkout.exists():
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", REPOSITORY, str(checkout)], check=True)
subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "orjson"], check=True)  # what notebooks may lack
environment = os.environ | {
    "PYTHONPATH": os.pathsep.join(str((checkout / folder).resolve()) for folder in (".", "benchmarks")),
    "OMP_NUM_THREADS": "1",
}
script = checkout / "benchmarks" / "gpu_parts.py"
device = os.environ.get("DEVICE", "cuda")
results = Path(f"gpu_{device}.json")
results.unlink(missing_ok=True)
command = [sys.executable, str(script), "--device", device, "--out", ".", "--only", *PARTS]
with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
    assert running.stdout is not None
    for line in running.stdout:
        print(line, end="")
if results.exists():
    print(f"send back: {results.resolve()}")
