"""KungFu's policy for image classification (Mai et al., OSDI 2020): workers join so that the batch follows the noise
scale, with as many samples a worker all the time.

kfuse-run --workers 1 --max-workers 4 examples/kungfu_batch_size.py              # scikit-learn's digits
kfuse-run --workers 1 --max-workers 4 examples/kungfu_batch_size.py CIFAR_FOLDER
"""

import math
import sys

import torch

import kfuse as kf
from kfuse.data import load_cifar10, load_digits
from kfuse.models import ConvNet

PER_WORKER, MOST_WORKERS = 32, 4  # samples a step of each worker; workers


class FollowNoiseScale(kf.BasePolicy):
    step = 0

    def after_step(self):
        self.step += 1
        if self.step % 10:
            return
        kf.set_batch_size(PER_WORKER * kf.size())  # of the workers that are there: new ones come when they are ready
        noise_scale = kf.allreduce(kf.grad_noise_scale(), "avg")
        if not math.isnan(noise_scale):  # it is known
            wanted = round(noise_scale / PER_WORKER)
            kf.resize(min(max(wanted, kf.size()), MOST_WORKERS))


data = load_cifar10(sys.argv[1]) if len(sys.argv) > 1 else load_digits()
model = ConvNet(data.spec["input_shape"], data.spec["num_classes"], width=8)
opt = kf.Optimizer(torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9, weight_decay=1e-4))
summary = kf.fit(
    model,
    data.train,
    opt,
    FollowNoiseScale(),
    epochs=10,
    batch_size=PER_WORKER,
    micro_batch=4,
    batch_max=PER_WORKER * MOST_WORKERS,
    lr_scaling="linear",
    heldout=data.heldout,
)
if summary is not None and kf.rank() == 0:
    print(f"{summary['workers']} workers, batch {summary['batch_size']}, accuracy {summary['heldout_accuracy']:.3f}")
