"""Linear layers on the CPU in float32 by oneDNN, where it is faster than MKL, which torch's own layers use.

When few sequences are decoded, MKL takes longer to bring the weights into its own order, in every multiplication,
than to multiply: for serving, the weights are packed once into the order in which oneDNN reads them. When many
tokens are computed at once, as in training, that does not matter; but MKL leaves the wider half of the registers
unused on processors of other makers than Intel. Results differ from those of torch's layers in the last digits.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

_ROWS = 32
"""The rows (tokens of a forward pass) that the order is chosen for; other numbers are computed as well."""


def _multiply(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `inputs` [..., n] times the transposed `weight` [m, n], plus `bias` [m]."""
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


@cache
def _has_onednn() -> bool:
    """Return whether this build of torch has oneDNN's operations."""
    operations = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operations)


# --- serving -------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A linear layer for inference whose weight is packed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
        self._bias: torch.Tensor | None = layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., out_features] of `inputs` [..., in_features]."""
        return _multiply(inputs, self._weight, self._bias)

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
    if not _has_onednn():
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


# --- training ------------------------------------------------------------------------------------------


class OneDnnLinear(nn.Linear):
    """A linear layer that oneDNN multiplies forward and backward. Other types than float32 are left to torch."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., out_features] of `input` [..., in_features]."""
        if input.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        multiplication: Any = _Multiplication
        return multiplication.apply(input, self.weight, self.bias)


class _Multiplication(torch.autograd.Function):
    """`_multiply` with its gradients."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return _multiply(inputs, weight, bias)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        inputs, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        return (
            _multiply(gradient, weight.t()) if of_inputs else None,
            _weight_gradient(rows, inputs.reshape(-1, inputs.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _weight_gradient(gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the transposed `gradient` [rows, m] times `inputs` [rows, n]; oneDNN refuses to sum up no rows."""
    if not len(inputs):
        return inputs.new_zeros(gradient.shape[1], inputs.shape[1])
    return _multiply(gradient.t(), inputs.t())


def use_onednn_for_training(module: nn.Module) -> None:
    """Make the linear layers of a module on the CPU `OneDnnLinear`, where that is faster. Parameters and their
    names stay.
    """
    if not _trains_faster_with_onednn():
        return
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = OneDnnLinear


@cache
def _trains_faster_with_onednn() -> bool:
    """Return whether this processor has AVX-512 but is not Intel's. What is faster is not measured, because then
    the same training could round differently on the same machine.
    """
    if not _has_onednn() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    vendor = next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
    return vendor not in ("", "GenuineIntel")
