"""The noise scale in a training by Lightning: python examples/frameworks/lightning_module.py

The callback is all that is added to the script. Needs lightning (pip install 'kfuse[lightning]').
"""

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from kfuse.data import load_digits
from kfuse.integrations.lightning import NoiseScale
from kfuse.models import MLP


class Digits(lightning.LightningModule):
    def __init__(self, spec):
        super().__init__()
        self.net = MLP(spec["input_shape"], spec["num_classes"])

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    torch.manual_seed(0)
    digits = load_digits()
    x, y = digits.train.fetch(torch.arange(len(digits.train)).numpy())
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="auto", max_epochs=3, accumulate_grad_batches=4, callbacks=[NoiseScale()], logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Digits(digits.spec), loader)
    print({name: round(value.item(), 2) for name, value in trainer.callback_metrics.items()})
