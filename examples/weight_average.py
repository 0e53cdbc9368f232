"""A moving average of the weights (EMA) is evaluated. Alone, on several workers, or on workers that come and go:

python examples/weight_average.py
torchrun --nproc-per-node 2 examples/weight_average.py
kfuse-run --workers 2 --max-workers 4 examples/weight_average.py

The average is a part of the model that kfuse is given: so checkpoints have it, and workers that join.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import kfuse as kf
from kfuse.data import Dataset, load_digits

EPOCHS, BATCH = 5, 64


class Average(kf.BasePolicy):
    """Updates the average once after each step, and evaluates it once after each epoch."""

    def __init__(self, nets: nn.ModuleList, heldout: Dataset) -> None:
        self.nets, self.heldout = nets, heldout

    def after_step(self) -> None:  # a step that a lost worker interrupts is made again; this hook is not called before
        model, average = self.nets
        average.update_parameters(model)

    def after_epoch(self) -> None:  # the average has the epoch's last step
        x, y = self.heldout.fetch(torch.arange(len(self.heldout)).numpy())
        with torch.no_grad():
            accuracy = float((self.nets[1](x).argmax(1) == y).float().mean())
        kf.log(heldout_accuracy=accuracy)  # counts as an evaluation: the best writes best.pt, with run_dir=
        if kf.rank() == 0:
            print(f"accuracy of the average: {accuracy:.4f}")


def main() -> nn.ModuleList:
    torch.manual_seed(0)
    digits = load_digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    nets = nn.ModuleList([model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98)).eval()])
    opt, policy = kf.FusedAdamW(model.parameters(), lr=1e-3), Average(nets, digits.heldout)
    loader = kf.DataLoader(nets, digits.train, opt, policy=policy, batch_size=BATCH, micro_batch=16, epochs=EPOCHS)
    for step in loader:
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return nets


if __name__ == "__main__":
    main()
