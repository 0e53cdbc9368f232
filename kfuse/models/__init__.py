"""Models to train out of the box. Arguments the data can answer are named as in `DataSplit.spec`."""

from kfuse.models.convnet import ConvNet
from kfuse.models.gpt import GPT
from kfuse.models.mlp import MLP

__all__ = ["GPT", "MLP", "ConvNet"]
