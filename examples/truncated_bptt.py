"""A recurrent language model whose hidden state goes on from window to window (truncated back-propagation through
time). Alone, on several workers, or on workers that come and go:

python examples/truncated_bptt.py
torchrun --nproc-per-node 2 examples/truncated_bptt.py
kfuse-run --workers 2 --max-workers 4 examples/truncated_bptt.py

The text is cut into as many streams as a step has samples. A step takes the next window of each.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfuse as kf
from kfuse.data import Dataset

STREAMS, WINDOW, EPOCHS = 16, 32, 2
TEXT = b"To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 200


class Windows(Dataset):
    """Sample i is window i // STREAMS of stream i % STREAMS: bytes, their successors, number of stream and window."""

    def __init__(self, text: bytes) -> None:
        length = (len(text) - 1) // (STREAMS * WINDOW) * WINDOW
        codes = torch.tensor(list(text[: STREAMS * length + 1]))
        self._x, self._y = (each.view(STREAMS, -1, WINDOW) for each in (codes[:-1], codes[1:]))

    def __len__(self) -> int:
        return self._x.shape[0] * self._x.shape[1]

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> Any:
        window, stream = (torch.as_tensor(part) for part in np.divmod(indices, STREAMS))
        return self._x[stream, window], self._y[stream, window], stream, window

    def order(self, epoch: int) -> np.ndarray:
        return np.arange(len(self))


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(256, width), nn.Linear(width, 256)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.carried = kf.CarriedState(STREAMS, width)

    def forward(self, x: Tensor, stream: Tensor, window: Tensor) -> Tensor:
        """x: int64 [B, WINDOW] to logits [B, WINDOW, 256]. stream, window: int64 [B]."""
        state = self.carried.read(stream) * (window > 0)[:, None]  # an epoch begins with zeros
        output, state = self.rnn(self.embedding(x), state[None])
        self.carried.write(stream, state[0])
        return self.out(output)  # type: ignore[no-any-return]


def main(text: bytes = TEXT) -> Model:
    torch.manual_seed(0)
    model = Model()
    opt = kf.FusedAdamW(model.parameters(), lr=3e-3, clip_norm=1.0)
    for step in kf.DataLoader(model, Windows(text), opt, batch_size=STREAMS, micro_batch=4, epochs=EPOCHS):
        for x, y, stream, window in step:
            step.loss = F.cross_entropy(model(x, stream, window).flatten(0, 1), y.flatten())
            step.loss.backward()
        opt.step()
        opt.zero_grad()
        if step.number % 10 == 9 and kf.rank() == 0 and opt.stats:
            print(f"step {step.number + 1}: loss {opt.stats.loss:.3f}")
    return model


if __name__ == "__main__":
    main()
