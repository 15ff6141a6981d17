"""Linear layers whose weights are stored in the order in which oneDNN multiplies by them.

MKL, with which torch multiplies by weights in their usual order, brings them into such an order in every
multiplication, and when few sequences are decoded that takes longer than the multiplication. The results differ in
the last digits only.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

_ROWS = 32
"""The rows (tokens of a forward pass) that the order is chosen for; other numbers are computed as well."""


class PackedLinear(nn.Module):
    """A linear layer for inference on the CPU in float32."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
        self._bias: torch.Tensor | None = layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., out_features] of `inputs` [..., in_features]."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self._bias, "none", [], "")

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the weight in its usual order, [out_features, in_features]."""
        return self._weight.to_dense()

    def unpacked(self) -> nn.Linear:
        """Return an ordinary layer with copies of the weight and the bias."""
        weight = self.weight
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=self._bias is not None)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if self._bias is not None:
            layer.bias = nn.Parameter(self._bias.clone(), requires_grad=False)
        return layer


def pack_linear_layers(module: nn.Module) -> None:
    """Replace the linear layers of a module, in place; without oneDNN in this build of torch nothing changes.

    The memory of the replaced weights is freed, except for one that is also the embedding.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))


def unpacked_copy(module: Any) -> Any:
    """Return a copy of a `transformers` model with ordinary linear layers; the embedding is shared with the output
    layer where the model's config says so.
    """
    layers = {id(layer): layer.unpacked() for layer in module.modules() if isinstance(layer, PackedLinear)}
    copied = copy.deepcopy(module, layers)
    copied.tie_weights()
    return copied
