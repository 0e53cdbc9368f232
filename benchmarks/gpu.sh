#!/usr/bin/env bash
# Everything there is to check and to measure on a machine with GPUs, in one call of at most ten minutes:
#     benchmarks/gpu.sh                               what takes one GPU
#     benchmarks/gpu.sh --two                         what takes two
#     DEVICE=cpu OUT=/somewhere benchmarks/gpu.sh     a rehearsal on a machine without one (gloo in place of NCCL)
# Needs Python 3.11, what kfuse needs (pip install .) and, for GPUs, a C compiler with Python's headers (`kfuse doctor` looks).
# The result is one JSON file in OUT; the exit status is 0, 1 if a part failed, or 2 if torch sees no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
if ! command -v "$python" > /dev/null; then
    echo "gpu.sh: no $python: install Python 3.11 or later, or name it: PYTHON=/path/to/python benchmarks/gpu.sh" >&2
    exit 2
fi
export PYTHONPATH="$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" benchmarks/gpu_parts.py --device "${DEVICE:-cuda}" --out "${OUT:-benchmarks/results}" "$@"
