"""Modules that measure their own gradients example by example, so that one micro-batch has a noise scale."""

from kfuse.nn.linear import linear_sq_norms
from kfuse.nn.norm import LayerNorm, NormLayersNoise, RMSNorm, norm_layers_noise

__all__ = ["LayerNorm", "NormLayersNoise", "RMSNorm", "linear_sq_norms", "norm_layers_noise"]
