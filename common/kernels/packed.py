"""Weights in the compiled kernels' layouts, and their products with rows.

A product is summed in float32 along the inputs in one order, whatever rows come with a row and however many
threads share the work, so a row's bits are its own.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from common.kernels.decoder_cpu import BLOCK_INPUTS, DecoderKernels, Matrix
from common.kernels.huge_pages import HugePages

_BF16, _Q4, _Q8 = range(3)


@dataclass(frozen=True, slots=True)
class QuantisedBlocks:
    """A weight as a checkpoint stores it in blocks of 32 inputs: w = scale · q + minimum.

    scales: float16 [outputs, inputs / 32]. minima: the same; None where there are none. quants: [outputs,
    inputs]; with minima uint8 0 … 15, without int8.
    """

    scales: torch.Tensor
    minima: torch.Tensor | None
    quants: torch.Tensor

    @staticmethod
    def rounded(weight: torch.Tensor) -> QuantisedBlocks:
        """8 bits without minima: the largest weight of a block is 127 or −127 times its scale. weight:
        [outputs, inputs], inputs a multiple of 32."""

        blocks = weight.float().view(weight.shape[0], -1, BLOCK_INPUTS)
        scales = (blocks.abs().amax(dim=-1) / 127).half()
        steps = scales.float().where(scales > 0, 1.0).unsqueeze(-1)
        quants = (blocks / steps).round().clamp(-127, 127).to(torch.int8)
        return QuantisedBlocks(scales, None, quants.view(weight.shape))

    @staticmethod
    def stacked(parts: list[QuantisedBlocks]) -> QuantisedBlocks:
        """Outputs one below the other; all parts have minima, or none has."""

        minima = [part.minima for part in parts if part.minima is not None]
        return QuantisedBlocks(
            torch.cat([part.scales for part in parts]),
            torch.cat(minima) if minima else None,
            torch.cat([part.quants for part in parts]),
        )


class PackedMatrix:
    """y = x Wᵀ + b for x of bfloat16 [rows, in_features].

    wide: y is float32, else bfloat16. paired: W is a gate above an up-projection of the same size, laid out
    for the step kernel, which alone may use it. Keeps what it reads alive.
    """

    def __init__(
        self,
        kernels: DecoderKernels,
        memory: HugePages,
        weight: torch.Tensor | QuantisedBlocks,
        bias: torch.Tensor | None = None,
        *,
        wide: bool = False,
        paired: bool = False,
    ) -> None:
        """weight: bfloat16 [out, in], or blocks. Raises ValueError for sizes that have no layout."""

        self._kernels = kernels
        quants = weight if isinstance(weight, torch.Tensor) else weight.quants
        self.out_features, self.in_features = quants.shape
        self._wide = wide
        self._bias = None if bias is None else bias.float().contiguous()
        if self.in_features % 2 or (paired and self.out_features % 2):
            raise ValueError(f"a weight of {list(quants.shape)} cannot be packed: inputs must be even")
        self.matrix = Matrix(
            None,
            None if self._bias is None else self._bias.data_ptr(),
            self.out_features,
            self.in_features,
            _format(weight),
            paired,
        )
        self._data = memory.allocate(kernels.packed_bytes(ctypes.byref(self.matrix)))
        self.matrix.data = self._data.data_ptr()
        self._pack(weight)

    def _pack(self, weight: torch.Tensor | QuantisedBlocks) -> None:
        to = self._data.data_ptr()
        if isinstance(weight, torch.Tensor):
            if weight.dtype != torch.bfloat16:
                raise ValueError(f"weight is {weight.dtype}; bfloat16 is needed")
            source = weight.contiguous()
            self._kernels.pack_bf16(ctypes.byref(self.matrix), source.data_ptr(), to)
            return
        scales, quants = weight.scales.contiguous(), weight.quants.contiguous()
        if weight.minima is None:
            self._kernels.pack_q8(ctypes.byref(self.matrix), scales.data_ptr(), quants.data_ptr(), to)
        else:
            minima = weight.minima.contiguous()
            pointers = (scales.data_ptr(), minima.data_ptr(), quants.data_ptr(), to)
            self._kernels.pack_q4(ctypes.byref(self.matrix), *pointers)

    @property
    def has_minima(self) -> bool:
        """Products need the sums of every block of inputs."""

        return bool(self.matrix.format == _Q4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises ValueError for rows of another kind, and for a paired matrix."""

        if self.matrix.paired:
            raise ValueError(
                "a paired matrix has no product of its own: the step kernel multiplies its halves"
            )
        rows = x.shape[0]
        if x.shape != (rows, self.in_features) or x.dtype != torch.bfloat16:
            raise ValueError(
                f"rows are {x.dtype} {list(x.shape)}; bfloat16 [rows, {self.in_features}] is needed"
            )
        x = x.contiguous()
        y = torch.empty(rows, self.out_features, dtype=torch.float32 if self._wide else torch.bfloat16)
        sums = torch.empty(rows * self.in_features // BLOCK_INPUTS) if self.has_minima else None
        self._kernels.product(
            ctypes.byref(self.matrix),
            x.data_ptr(),
            y.data_ptr(),
            None if sums is None else sums.data_ptr(),
            rows,
            self._wide,
            torch.get_num_threads(),
        )
        return y


def _format(weight: torch.Tensor | QuantisedBlocks) -> int:
    if isinstance(weight, torch.Tensor):
        return _BF16
    return _Q8 if weight.minima is None else _Q4
