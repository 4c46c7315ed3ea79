"""What a decoder layer does between its linear layers, compiled for bfloat16 on a CPU with AVX-512.

Tensors are contiguous. The references are `common.model.layers`, `common.model.rope` and
`common.attention.torch_backend`; results agree with them up to rounding, not in their bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.kernels.build import KernelsUnavailable, compiled, load

SOURCE = Path(__file__).with_suffix(".cpp")
INSTRUCTION_SETS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
MAX_HEAD_DIM = 256

_POINTER, _INT64, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ADD_NORM = (*[_POINTER] * 4, _INT64, _INT64, _FLOAT, _INT)
_SILU_MUL = (_POINTER, _POINTER, _INT64, _INT64, _INT)
_ATTENTION = (
    *[_POINTER] * 3,
    _FLOAT,
    *[_POINTER] * 2,
    _FLOAT,
    *[_POINTER] * 4,
    *[_INT64] * 2,
    *[_POINTER] * 3,
    *[_INT64] * 4,
    _INT,
)


@dataclass(frozen=True, slots=True)
class DecoderKernels:
    """Entry points of the library; decoder_cpu.cpp has their contracts. They release the interpreter's lock.
    identity: names source, compiler and flags."""

    identity: str
    add_norm: Callable[..., None]
    silu_mul: Callable[..., None]
    attention: Callable[..., None]


@functools.cache
def decoder_kernels() -> DecoderKernels:
    """Raises KernelsUnavailable, whose message says what to do."""

    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX512"):
        raise KernelsUnavailable(f"the CPU offers {capability}; the compiled kernels need AVX512")
    path = compiled(SOURCE, INSTRUCTION_SETS)
    library = load(path)
    return DecoderKernels(
        path.stem,
        _entry(library, "paceline_add_norm", _ADD_NORM),
        _entry(library, "paceline_silu_mul", _SILU_MUL),
        _entry(library, "paceline_attention", _ATTENTION),
    )


def _entry(library: ctypes.CDLL, name: str, arguments: tuple[type, ...]) -> Callable[..., None]:
    function = getattr(library, name)
    function.argtypes = arguments
    function.restype = None
    return function  # type: ignore[no-any-return]
