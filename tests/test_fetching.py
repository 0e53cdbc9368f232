"""What is fetched depends on (seed, epoch, indices) alone: not on the step, the batch size, or who fetched before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kfuse as kf
from kfuse.data import EpochSampler, MapData
from kfuse.data.fetching import Fetcher, Task, fetch, random_key
from kfuse.data.sampler import micro_batch_sizes, worker_range


class Noise(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Draws from all three global generators, a number of times that depends on the sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        draws = [float(torch.rand(())) + np.random.rand() + random.random() for _ in range(1 + i % 3)]
        return torch.tensor([float(i), sum(draws)], dtype=torch.float64), i


class Drawing:
    """A data set of the second kind: it fetches a micro-batch as a whole, with the generator that it is given."""

    def __len__(self) -> int:
        return 40

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices)
        return torch.rand(len(rows), 2, generator=generator) + np.random.rand(), rows


seeds, epochs = st.integers(0, 2**64), st.integers(0, 1000)


def disturb() -> None:
    """As whatever ran before in this process may leave the generators."""
    torch.rand(random.randrange(5)), np.random.rand(3)


@given(seeds, epochs, st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(1, 4)), min_size=1))
def test_a_samples_noise_depends_on_seed_epoch_and_index_alone(
    seed: int, epoch: int, steps: list[tuple[int, int, int]]
) -> None:
    """Any batch sizes, micro-batches and workers, from step to step: each sample comes out as it does alone."""
    fetcher = Fetcher(MapData(Noise()), EpochSampler(40, seed))
    alone = {i: fetch(MapData(Noise()), np.array([i]), seed, epoch)[0][0] for i in range(40)}
    cursor, k = 0, 0
    while cursor < 40:
        batch, micro, workers = steps[k % len(steps)]
        batch, k = min(batch, 40 - cursor), k + 1
        sizes = micro_batch_sizes(batch, micro)
        for rank in range(workers):
            for j in worker_range(len(sizes), workers, rank):
                disturb()
                x, y = fetcher.fetch(Task(epoch, cursor + j * micro, sizes[j]))
                for row, i in zip(x, y.tolist(), strict=True):
                    assert torch.equal(row, alone[i])
        cursor += batch


@given(seeds, epochs, st.integers(0, 39), st.integers(1, 40))
def test_a_whole_micro_batch_is_drawn_by_its_first_index(seed: int, epoch: int, cursor: int, count: int) -> None:
    task = Task(epoch, cursor, min(count, 40 - cursor))
    first = Fetcher(Drawing(), EpochSampler(40, seed)).fetch(task)
    disturb()
    again = Fetcher(Drawing(), EpochSampler(40, seed)).fetch(task)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_another_epoch_or_seed_draws_other_numbers() -> None:
    indices = np.arange(6)
    for data in (MapData(Noise()), Drawing()):
        one, *others = (fetch(data, indices, seed, epoch)[0] for seed, epoch in ((1, 0), (1, 1), (2, 0)))
        assert all(not torch.equal(one, other) for other in others)


@given(st.lists(st.tuples(st.integers(0, 2**64), st.integers(0, 2**40), st.integers(0, 2**40)), unique=True))
def test_keys_are_63_bits_and_do_not_meet(numbers: list[tuple[int, int, int]]) -> None:
    keys = [random_key(*each) for each in numbers]
    assert all(0 <= key < 2**63 for key in keys)
    assert len({seed % 2**64 for seed, *_ in numbers}) < len(numbers) or len(set(keys)) == len(keys)


class Heard(torch.nn.Module):
    """Keeps what its forward gets and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
        self.seen: dict[int, list[float]] = {}
        self.drawn: list[tuple[float, float, float]] = []

    def forward(self, x: Tensor) -> Any:
        self.drawn.append((float(torch.rand(())), np.random.rand(), random.random()))
        for i, noise in x.tolist():
            self.seen.setdefault(int(i), []).append(noise)
        return self.linear(x.float()).squeeze(1)


def train(batch_size: int, micro_batch: int) -> Heard:
    kf.init()
    model = Heard()
    opt = kf.FusedSGD(model.parameters(), lr=1e-4)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.mean()

    kf.fit(model, Noise(), opt, batch_size=batch_size, batch_micro=micro_batch, train_epochs=2, seed=3, loss_fn=loss)
    return model


def test_training_uses_the_same_samples_for_any_batch_size() -> None:
    first = train(8, 4)
    assert sorted(first.seen) == list(range(40)) and all(len(set(noise)) == 2 for noise in first.seen.values())
    assert train(20, 3).seen == first.seen


def test_what_a_forward_draws_does_not_depend_on_what_its_fetch_drew() -> None:
    """Also from numpy and random: a loop's mix-up draws from them."""

    class Quiet(Noise):
        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return torch.tensor([float(i), 0.0], dtype=torch.float64), i

    noisy = train(8, 4)
    with_quiet = Heard()
    kf.fit(
        with_quiet,
        Quiet(),
        kf.FusedSGD(with_quiet.parameters(), lr=1e-4),
        batch_size=8,
        batch_micro=4,
        train_epochs=2,
        seed=3,
        loss_fn=lambda output, target: output.mean(),
    )
    assert with_quiet.drawn == noisy.drawn and len(set(noisy.drawn)) == len(noisy.drawn)
