#!/usr/bin/env bash
# Everything there is to check and to measure on one GPU, in one call and under nine minutes:
#     benchmarks/gpu.sh
#     DEVICE=cpu OUT=/somewhere benchmarks/gpu.sh     the same parts on a machine without one (gloo in place of NCCL)
# Needs torch, numpy and Triton. Results are JSON files in OUT; the exit status says whether a part failed.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" benchmarks/gpu.py --device "${DEVICE:-cuda}" --out "${OUT:-benchmarks/results}"
