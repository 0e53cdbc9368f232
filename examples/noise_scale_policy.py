"""KungFu's example, with kfuse: a worker more whenever the gradient noise scale grows.

kfuse-run --workers 1 --max-workers 3 examples/noise_scale_policy.py
"""

import torch

import kfuse as kf
from kfuse.data import load_digits
from kfuse.models import MLP


class GNSPolicy(kf.BasePolicy):
    prev = float("inf")

    def after_step(self):
        gns = kf.grad_noise_scale()
        avg = kf.allreduce(gns, "avg")
        if avg > self.prev:
            kf.resize(kf.size() + 1)
        self.prev = avg


digits = load_digits()
model = MLP(digits.spec["input_shape"], digits.spec["num_classes"])
opt = kf.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
hook = GNSPolicy()
print(kf.fit(model, digits.train, opt, hook, batch_size=64, micro_batch=8, epochs=60, heldout=digits.heldout))
