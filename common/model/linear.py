"""Linear layers whose result for a row has the same bits whatever rows come with it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

MAX_ROWS = 1024
"""Most rows for which the packed kernel was compared bit by bit with its smallest call; more are split."""

MIN_ROWS = 4
"""Fewer are padded with zero rows: oneDNN's kernel for one row may have other bits, and those for one and two
rows take longer than four."""


class Linear(Protocol):
    """y = x Wᵀ + b for x of [rows, in_features], of the class's own dtype."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PackedBf16Linear:
    """bfloat16 weights in oneDNN's blocked layout, made once; products are summed in float32.

    weight: bfloat16 [out, in]; it is copied and may be dropped. bias: bfloat16 [out] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        require_packed_bf16()
        if weight.dtype != torch.bfloat16:
            raise TypeError(f"weight is {weight.dtype}; bfloat16 is needed")
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows < MIN_ROWS:
            return self._product(F.pad(x, (0, 0, 0, MIN_ROWS - rows)))[:rows]
        if rows <= MAX_ROWS:
            return self._product(x)
        return torch.cat([self(x[first : first + MAX_ROWS]) for first in range(0, rows, MAX_ROWS)])

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class Float32Linear:
    """For parity tests: float32 products, whose bits may change with the number of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


def require_packed_bf16() -> None:
    """Raises RuntimeError where oneDNN has no bfloat16 for this CPU."""

    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise RuntimeError(
            "oneDNN offers no bfloat16 on this CPU (AVX-512 is needed), so models cannot be served on it;"
            " run on a"
            " CPU with AVX-512, and check that torch.backends.mkldnn is enabled"
        )


def linear(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
    """The class that serves dtype. weight: [out, in] in any floating-point type."""

    converted_bias = None if bias is None else bias.to(dtype)
    if dtype == torch.bfloat16:
        return PackedBf16Linear(weight.to(dtype), converted_bias)
    if dtype == torch.float32:
        return Float32Linear(weight.to(dtype), converted_bias)
    raise ValueError(
        f"dtype {dtype} is not supported; torch.bfloat16 serves, torch.float32 is for parity tests"
    )
