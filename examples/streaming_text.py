"""Text that is read as it is used, from a file for each shard: python examples/streaming_text.py FILE [FILE ...]

kfuse-run --workers 2 --max-workers 3 examples/streaming_text.py FILE ...: each byte window is used exactly once
in a pass over its file, whichever workers come and go.
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F

import kfuse as kf
from kfuse.data import Source
from kfuse.models import GPT

CONTEXT = 32


class Files(Source):
    """Windows of CONTEXT + 1 bytes of text files, each of which is a shard."""

    block = 4

    def __init__(self, files):
        self.files, self.shards = files, len(files)

    def open(self, shard, position):
        with open(self.files[shard], "rb") as file:
            file.seek(position * CONTEXT)
            while len(window := file.read(CONTEXT + 1)) == CONTEXT + 1:
                file.seek(-1, 1)  # a window's last byte is the next one's first
                window = torch.from_numpy(np.frombuffer(window, dtype=np.uint8).astype(np.int64))
                yield window[:-1], window[1:]


def main(files):
    torch.manual_seed(0)
    model = GPT(vocab_size=256, block_size=CONTEXT, layers=2, heads=2, width=64)
    opt = kf.FusedAdamW(model.parameters(), lr=1e-3)
    summary = kf.fit(model, Files(files), opt, batch_size=16, micro_batch=4, steps=60, loss_fn=bits)
    if kf.rank() == 0:
        print(f"{summary['samples']} windows, {summary['loss']:.2f} bits a byte")


def bits(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) / np.log(2)


if __name__ == "__main__":
    main(sys.argv[1:])
