"""Exposed communication of GPT-2 small on 8 GPUs, COMPUTED from launch order and published figures, not measured.

    python benchmarks/gpu_overlap.py

Buckets are kfuse's own (comm.bucket_mb=25, fp32). Gradients come in the reverse of the parameters' order, and a bucket
is there when all of its parameters are: the token embedding, which is the last layer's weight too, comes at the very
end. Backward takes 4 FLOP a parameter and token, those of the embedding's rows at the start, where logits are computed.
Messages follow each other; each takes 2 (n - 1) / n of its bytes over a GPU's link, and a fixed time. Exposed is what
the last message takes beyond the end of backward.
"""

from __future__ import annotations

import math

from kernels_shapes import gpt2

from kfuse.comm.buckets import plan_buckets

GPUS, TOKENS = 8, 8 * 1024  # tokens of a GPU's micro-batch
FLOPS = 0.4 * 989e12  # 40 % of an H100's bf16 by its data sheet
FIXED_S = 20e-6  # of a message: launch and latency
LINKS = {
    "NVLink 4, 450 GB/s a direction (H100's data sheet), 80 % of it": 0.8 * 450e9,
    "PCIe 5 x16, 64 GB/s a direction, 80 % of it": 0.8 * 64e9,
    "one 400 Gbit/s port a GPU, 80 % of it": 0.8 * 50e9,
}


def main() -> None:
    sizes = [math.prod(shape) for shape in gpt2().shapes]
    embedding = sizes[0]
    seconds = [4 * size * TOKENS / FLOPS for size in sizes]
    backward_s = sum(seconds)
    ready, now = dict[int, float](), seconds[0]  # the logits' products come first
    for index in reversed(range(len(sizes))):
        now += seconds[index] if index else 0.0
        ready[index] = now
    buckets = plan_buckets(sizes, ["fp32"] * len(sizes), 25 * 2**20 // 4)
    print(
        f"GPT-2 small, {TOKENS} tokens a GPU, {GPUS} GPUs, computed, not measured: backward {1e3 * backward_s:.1f} ms,"
    )
    print(f"{len(buckets)} buckets, the last with the embedding's {4 * embedding / 1e6:.0f} MB\n")
    print(f"{'link':<66}{'messages':>10}{'exposed':>10}   (ms)")
    for name, rate in LINKS.items():
        end = total = 0.0
        for bucket in buckets:
            numel = sum(sizes[index] for index in bucket.params)
            takes = FIXED_S + 2 * (GPUS - 1) / GPUS * 4 * numel / rate
            end = max(end, max(ready[index] for index in bucket.params)) + takes
            total += takes
        print(f"{name:<66}{1e3 * total:>10.1f}{1e3 * (end - backward_s):>10.1f}")


if __name__ == "__main__":
    main()
