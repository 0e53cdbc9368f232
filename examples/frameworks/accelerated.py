"""The noise scale in a training by Hugging Face Accelerate: python examples/frameworks/accelerated.py

On two processes: torchrun --nproc-per-node 2 examples/frameworks/accelerated.py. The lines with attach and monitor are
all that is added to the script. Needs accelerate (pip install 'kfuse[accelerate]').
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from kfuse.data import load_digits
from kfuse.integrations.accelerate import attach
from kfuse.models import MLP

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=4, cpu=not torch.cuda.is_available())
digits = load_digits()
x, y = digits.train.fetch(torch.arange(len(digits.train)).numpy())
model = MLP(digits.spec["input_shape"], digits.spec["num_classes"])
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, opt, loader = accelerator.prepare(model, opt, loader)
monitor = attach(accelerator, model)

for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
    least = monitor.stats.noise_scale_low
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, noise scale at least {least} samples")
