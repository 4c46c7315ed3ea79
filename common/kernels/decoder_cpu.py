"""A decoder's layers in one call, compiled for bfloat16 activations on a CPU with AVX-512 BF16; and the layer
of a draft head.

`cpu/layer.h`, `cpu/head.h`, `cpu/growth.h` and `cpu/matrix.h` have the contracts of the structs below. The
references are `common.model.layers`, `common.model.rope`, `common.attention.torch_backend`,
`common.model.eagle3` and `services.draft.eagle.growth`; results agree with them up to rounding, not in their
bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.kernels.build import KernelsUnavailable, compiled, load

SOURCE = Path(__file__).parent / "cpu" / "decoder.cpp"
INSTRUCTION_SETS = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bf16",
    "-mfma",
    "-mf16c",
)
MAX_HEAD_DIM = 256
MAX_LAYERS = 400
BLOCK_INPUTS = 32
"""Inputs that share a scale in a block format."""

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Matrix(ctypes.Structure):
    _fields_ = (
        ("data", _POINTER),
        ("bias", _POINTER),
        ("outputs", _INT64),
        ("inputs", _INT64),
        ("format", _INT32),
        ("paired", _INT32),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    )


class Shape(ctypes.Structure):
    _fields_ = (
        ("layers", _INT64),
        ("hidden", _INT64),
        ("inner", _INT64),
        ("heads", _INT64),
        ("kv_heads", _INT64),
        ("head_dim", _INT64),
        ("eps", _FLOAT),
        ("head_eps", _FLOAT),
        ("scale", _FLOAT),
        ("threads", _INT32),
    )


class Rows(ctypes.Structure):
    _fields_ = (
        ("rows", _INT64),
        ("longest", _INT64),
        ("positions", _POINTER),
        ("write_slots", _POINTER),
        ("key_starts", _POINTER),
        ("key_slots", _POINTER),
        ("counts", _POINTER),
        ("picked", _POINTER),
        ("cosine", _POINTER),
        ("sine", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("layer_stride", _INT64),
    )


class Memory(ctypes.Structure):
    _fields_ = (
        ("residual", _POINTER),
        ("normed", _POINTER),
        ("qkv", _POINTER),
        ("attended", _POINTER),
        ("active", _POINTER),
        ("sums", _POINTER),
        ("captured", _POINTER),
        ("capture_at", _POINTER),
        ("captures", _INT64),
    )


class Head(ctypes.Structure):
    _fields_ = (
        ("layer", Layer),
        ("input_norm", _POINTER),
        ("feature_norm", _POINTER),
        ("norm", _POINTER),
        ("embedding", _POINTER),
        ("lm_head", Matrix),
        ("logit_scale", _FLOAT),
        ("norm_before_residual", _INT32),
        ("norm_output", _INT32),
    )


class HeadRows(ctypes.Structure):
    _fields_ = (
        ("features", _POINTER),
        ("parents", _POINTER),
        ("ids", _POINTER),
        ("entered", _POINTER),
        ("last", _INT64),
        ("fed_back", _INT32),
    )


class Ranked(ctypes.Structure):
    _fields_ = (
        ("rows", _INT64),
        ("width", _INT64),
        ("outputs", _POINTER),
        ("normed", _POINTER),
        ("logits", _POINTER),
        ("scores", _POINTER),
        ("ids", _POINTER),
    )


class Growth(ctypes.Structure):
    _fields_ = (
        ("slots", _INT64),
        ("width", _INT64),
        ("levels", _INT64),
        ("most", _INT64),
        ("budgets", _POINTER),
        ("bases", _POINTER),
        ("target_ids", _POINTER),
        ("outputs", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("known", _POINTER),
        ("counts", _POINTER),
        ("cosine", _POINTER),
        ("sine", _POINTER),
        ("tokens", _POINTER),
        ("parents", _POINTER),
        ("sizes", _POINTER),
    )


_PRODUCT = (_POINTER, _POINTER, _POINTER, _POINTER, _INT64, _INT32, _INT32)


@dataclass(frozen=True, slots=True)
class DecoderKernels:
    """Entry points of the library. They release the interpreter's lock. identity: names source, compiler and
    flags."""

    identity: str
    packed_bytes: Callable[..., int]
    pack_bf16: Callable[..., None]
    pack_q4: Callable[..., None]
    pack_q8: Callable[..., None]
    product: Callable[..., None]
    step: Callable[..., None]
    head_layer: Callable[..., None]
    head_rank: Callable[..., None]
    head_growth_bytes: Callable[..., int]
    head_grow: Callable[..., None]


@functools.cache
def decoder_kernels() -> DecoderKernels:
    """Raises KernelsUnavailable, whose message says what to do."""

    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX512") or not torch.cpu._is_avx512_bf16_supported():
        raise KernelsUnavailable(f"the CPU offers {capability}; the compiled kernels need AVX512 with BF16")
    path = compiled(SOURCE, INSTRUCTION_SETS)
    library = load(path)
    return DecoderKernels(
        identity=path.stem,
        packed_bytes=_entry(library, "paceline_packed_bytes", (_POINTER,), _INT64),
        pack_bf16=_entry(library, "paceline_pack_bf16", (_POINTER,) * 3),
        pack_q4=_entry(library, "paceline_pack_q4", (_POINTER,) * 5),
        pack_q8=_entry(library, "paceline_pack_q8", (_POINTER,) * 4),
        product=_entry(library, "paceline_product", _PRODUCT),
        step=_entry(library, "paceline_step", (_POINTER,) * 4),
        head_layer=_entry(library, "paceline_head_layer", (_POINTER,) * 5),
        head_rank=_entry(library, "paceline_head_rank", (_POINTER,) * 3),
        head_growth_bytes=_entry(library, "paceline_head_growth_bytes", (_POINTER,) * 3, _INT64),
        head_grow=_entry(library, "paceline_head_grow", (_POINTER,) * 4),
    )


def _entry(
    library: ctypes.CDLL, name: str, arguments: tuple[type, ...], result: type | None = None
) -> Callable[..., Any]:
    function = getattr(library, name)
    function.argtypes = arguments
    function.restype = result
    return function  # type: ignore[no-any-return]
