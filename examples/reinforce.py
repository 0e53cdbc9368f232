"""REINFORCE, whose data come from an environment: the data set has the numbers of the episodes alone. Alone, on several
workers, or on workers that come and go:

python examples/reinforce.py
torchrun --nproc-per-node 2 examples/reinforce.py
kfuse-run --workers 2 --max-workers 4 examples/reinforce.py

All that an episode draws comes from torch's generator, which kfuse seeds for each micro-batch.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import kfuse as kf

EPISODES, BATCH, LENGTH, GOAL = 6400, 64, 12, 4.0


class Walker(nn.Module):
    """Walks on a line, one step to the left or right at a time, and is paid for being near a goal."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        self.register_buffer("baseline", torch.zeros(()))  # the running mean return, over all workers' episodes

    def play(self, episodes: int) -> tuple[Tensor, Tensor]:
        """Returns of each episode its return and the log-probability of its actions: [episodes], [episodes]."""
        place, goal = torch.zeros(episodes), GOAL * (2 * torch.randint(2, (episodes,)) - 1)
        returns, log_probs = torch.zeros(episodes), torch.zeros(episodes)
        for _ in range(LENGTH):
            actions = Categorical(logits=self.policy(torch.stack([place, goal], 1) / GOAL))
            action = actions.sample()
            log_probs = log_probs + actions.log_prob(action)
            place = place + 2 * action - 1
            returns = returns - (place - goal).abs() / LENGTH
        return returns, log_probs

    def loss(self, episodes: int) -> Tensor:
        returns, log_probs = self.play(episodes)
        loss = -((returns - self.baseline) * log_probs).mean()
        self.baseline += 0.1 * (returns.mean() - self.baseline)  # in place: kfuse averages the change
        return loss


def main() -> Walker:
    torch.manual_seed(0)
    walker = Walker()
    opt = kf.FusedAdamW(walker.parameters(), lr=1e-2)
    numbers = torch.utils.data.TensorDataset(torch.arange(EPISODES))
    for step in kf.DataLoader(walker, numbers, opt, batch_size=BATCH, micro_batch=16):
        for (episodes,) in step:
            step.loss = walker.loss(len(episodes))
            step.loss.backward()
        opt.step()
        opt.zero_grad()
        if step.number % 20 == 19 and kf.rank() == 0:
            print(f"step {step.number + 1}: mean return {float(walker.baseline):.2f}")
    return walker


if __name__ == "__main__":
    main()
