"""Linear layers with weights and inputs of 8 bits, for encoders on x86-64 CPUs.

A layer computes y = W x + b. Each row of W (one output) and each row of inputs (one token) has a
scale of its own, so the vector of a text does not depend on the texts beside it:

    weights  int8 from -63 to 63, the largest of the row being 63
    inputs   uint8, 128 plus -127 to 127, the largest of the row being 127
    sums     int32, by oneDNN, then times both scales, plus the bias, in float32

Weights have 7 bits because processors without VNNI add two products in 16 bits, which saturate:
2 * 255 * 63 is below 32,768. So all processors compute the same, and none rounds. The quality
is no worse than with 8 (docs/log/encoders.md).

The operators are those that torch.compile emits for quantised models. They are not public;
`PRIVATE` lists them. torch's own quantised tensors would do, but are to be removed from torch.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable

import torch
from torch import nn

from cfg_core.errors import CompatibilityError, ConfigError

PRIVATE = ("qlinear_prepack", "qlinear_pointwise")
"""Operators of torch.ops.onednn that this module calls."""

_MAX_WEIGHT, _MAX_INPUT, _ZERO = 63, 127, 128
_LEAST = 1e-12  # scale of a row of zeros
_SAME_INPUT = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
)
"""Names of layers that a module calls with the same rows. They are one product here."""


def check_int8(device: torch.device) -> None:
    """Raise ConfigError where these layers do not run, or have not been tried."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigError(
            "quantization int8 is for x86-64 CPUs, and the encoder would run on"
            f" {device.type if device.type != 'cpu' else platform.machine()}: leave it out."
        )
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise ConfigError("quantization int8 needs a torch with oneDNN: leave it out.")


class Int8Linear(nn.Module):
    """`nn.Linear` layers that take the same rows, in 8 bits, for inference.

    Forward: float32 [..., in_features] -> [..., sum of all out_features].
    """

    def __init__(self, linears: Iterable[nn.Linear]) -> None:
        super().__init__()
        linears = list(linears)
        weight = torch.cat([linear.weight.detach().float() for linear in linears])
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.bias = torch.cat([_bias_of(linear) for linear in linears])
        self._scale = weight.abs().amax(1).clamp_min(_LEAST) / _MAX_WEIGHT
        whole = (weight / self._scale[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(whole, None)
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)
        self._rounding = torch.tensor(_ZERO + 0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        largest = torch.maximum(rows.amax(-1, keepdim=True), -rows.amin(-1, keepdim=True))
        scale = largest.clamp_min_(_LEAST).mul_(1 / _MAX_INPUT)
        whole = torch.addcdiv(self._rounding, rows, scale).to(torch.uint8)
        sums = torch.ops.onednn.qlinear_pointwise(
            *(whole, 1.0, _ZERO),
            *(self.weight, self._scale, self._zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return torch.addcmul(self.bias, sums, scale)


class _Joined:
    """One product for several layers, which are called one after the other with the same rows."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._linear = Int8Linear(linears)
        self._sizes = [linear.out_features for linear in linears]
        self._rows: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}

    def part(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """The output of layer `index`: a view. Nothing is kept once each layer was called."""
        if rows is not self._rows or index not in self._parts:
            self._rows = rows
            self._parts = dict(enumerate(self._linear(rows).split(self._sizes, -1)))
        result = self._parts.pop(index)
        if not self._parts:
            self._rows = None
        return result


class _Part(nn.Module):
    """One of the layers of a `_Joined`."""

    def __init__(self, joined: _Joined, index: int) -> None:
        super().__init__()
        self._joined, self._index = joined, index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._joined.part(rows, self._index)


def quantize_linears(backbone: nn.Module) -> int:
    """Replace the linear layers of the backbone's lists of layers, in place; returns how many.

    Embeddings, poolers and heads stay as they are: they are small, or read a single token.
    Raises CompatibilityError if there is none.
    """
    num_replaced = 0
    for layers in [m for m in backbone.modules() if isinstance(m, nn.ModuleList)]:
        for module in list(layers.modules()):
            num_replaced += sum(_join(module, names) for names in _SAME_INPUT)
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, Int8Linear([child]))
                    num_replaced += 1
    if not num_replaced:
        raise CompatibilityError(
            f"{type(backbone).__name__} has no linear layers that quantization int8 knows: leave it"
            " out."
        )
    return num_replaced


def _join(module: nn.Module, names: tuple[str, ...]) -> int:
    """Replace the layers of these names with one product; returns how many they were."""
    linears = [getattr(module, name, None) for name in names]
    found = [linear for linear in linears if type(linear) is nn.Linear]
    if len(found) < len(names):
        return 0
    joined = _Joined(found)
    for index, name in enumerate(names):
        setattr(module, name, _Part(joined, index))
    return len(names)


def _bias_of(linear: nn.Linear) -> torch.Tensor:
    if linear.bias is None:
        return torch.zeros(linear.out_features)
    return linear.bias.detach().float()
