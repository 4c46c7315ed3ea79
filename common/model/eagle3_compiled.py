"""An EAGLE-3 head in two calls of the compiled kernels: its layer, attention included, and the ranking of
what it predicts. `common.model.eagle3` is the reference.

Weights are held in 8 bits where their sizes allow it: between two drafts the target reads its own weights, so
those of the head come from memory each time, and a drafter's bits are nobody's to rely on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.attention.kv_cache import KvCache
from common.kernels.build import KernelsUnavailable
from common.kernels.decoder_cpu import (
    BLOCK_INPUTS,
    DecoderKernels,
    Growth,
    Head,
    HeadRows,
    Layer,
    Memory,
    Ranked,
    Rows,
    Shape,
    decoder_kernels,
)
from common.kernels.huge_pages import HugePages
from common.kernels.packed import PackedMatrix, QuantisedBlocks
from common.model.eagle3 import embedding_of, fc_input
from common.model.eagle3_checkpoint import Eagle3Weights
from common.model.eagle3_config import Eagle3Config
from common.model.layers import RmsNorm
from common.model.rope import RopeTable

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class HeadKeys:
    """Where entries are written and read. write_slots: int64 [rows], physical positions of the rows' own.
    picked: int64 [outputs], the rows that attend. counts, starts: int64 [outputs], how many keys each sees,
    and where in `slots` (int64, physical positions) they begin; the row's own is among them."""

    write_slots: torch.Tensor
    picked: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor


class CompiledHead:
    """embedding: bfloat16 [vocab, hidden], the target's, used where the head brings none. max_positions: that
    the RoPE table has. Raises KernelsUnavailable, also for sizes that the kernels have no layout for."""

    def __init__(
        self, config: Eagle3Config, weights: Eagle3Weights, *, embedding: torch.Tensor, max_positions: int
    ) -> None:
        self._kernels = decoder_kernels()
        self.config = config
        self.target_ids = weights.target_ids
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._embedding = embedding_of(config, weights, embedding, DTYPE).contiguous()
        self._rope = RopeTable(config.rope, config.head_dim, max_positions)
        self._input_norm = None if weights.input_norm is None else _norm(weights.input_norm, config)
        self._fc_norms = tuple(_norm(weight, config) for weight in weights.fc_norms)
        memory = HugePages()

        def packed(weight: torch.Tensor, *, paired: bool = False, wide: bool = False) -> PackedMatrix:
            bias = weights.qkv_bias if weight is weights.qkv else None
            return _packed(self._kernels, memory, weight, bias, paired=paired, wide=wide)

        self._fc = packed(weights.fc)
        self._lm_head = packed(weights.lm_head, wide=True)
        self._matrices = {
            "qkv": packed(weights.qkv),
            "output": packed(weights.output),
            "gate_up": packed(weights.gate_up, paired=True),
            "down": packed(weights.down),
        }
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self._norms = {name: getattr(weights, name).to(DTYPE).contiguous() for name in names}
        self._head = Head(
            layer=Layer(
                mlp_norm=self._norms["post_attention_layernorm"].data_ptr(),
                **{name: matrix.matrix for name, matrix in self._matrices.items()},
            ),
            input_norm=self._norms["input_layernorm"].data_ptr(),
            feature_norm=self._norms["hidden_norm"].data_ptr(),
            norm=self._norms["norm"].data_ptr(),
            embedding=self._embedding.data_ptr(),
            lm_head=self._lm_head.matrix,
            logit_scale=config.logit_scale,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_output,
        )

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """The feature of positions whose states are the target's. aux: [rows, aux_size] → [rows, hidden]."""

        fused: torch.Tensor = self._fc(fc_input(aux, self._input_norm, self._fc_norms))
        return fused

    def layer(
        self,
        features: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KvCache,
        keys: HeadKeys,
        *,
        fed_back: bool,
    ) -> torch.Tensor:
        """Writes every row's entry and computes the outputs of the rows picked: [outputs, hidden], before the
        last norm. features: [rows, hidden], fused states, or (fed_back) outputs of the steps before. ids:
        int64 [rows], the token behind each. positions: int64 [rows], of the rotation. cache: one layer."""

        config = self.config
        rows, outputs = features.shape[0], keys.picked.shape[0]
        features = features.contiguous()
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        residual = features.new_empty(outputs, config.hidden_size)
        normed = torch.empty_like(residual)
        entered = features.new_empty(rows, 2 * config.hidden_size)
        qkv = features.new_empty(rows, query + 2 * key)
        attended = features.new_empty(outputs, query)
        active = features.new_empty(outputs, config.intermediate_size)
        described = Rows(
            rows=rows,
            longest=int(keys.counts.max()),
            positions=_indices(positions),
            write_slots=_indices(keys.write_slots),
            key_starts=_indices(keys.starts),
            key_slots=_indices(keys.slots),
            counts=_indices(keys.counts),
            picked=_indices(keys.picked),
            cosine=self._rope.cos.data_ptr(),
            sine=self._rope.sin.data_ptr(),
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
            layer_stride=cache.keys.stride(0),
        )
        given = HeadRows(features.data_ptr(), None, _indices(ids), entered.data_ptr(), outputs, fed_back)
        memory = Memory(
            residual=residual.data_ptr(),
            normed=normed.data_ptr(),
            qkv=qkv.data_ptr(),
            attended=attended.data_ptr(),
            active=active.data_ptr(),
        )
        self._kernels.head_layer(
            ctypes.byref(self._head),
            ctypes.byref(self._shape()),
            ctypes.byref(described),
            ctypes.byref(given),
            ctypes.byref(memory),
        )
        return residual

    def rank(self, outputs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """float32 [rows, draft_vocab], logits; of the width most probable draft ids, the most probable first,
        float32 [rows, width], log-probabilities, and int64 [rows, width], which they are."""

        rows = outputs.shape[0]
        outputs = outputs.contiguous()
        normed = torch.empty_like(outputs)
        logits = torch.empty(rows, self.config.draft_vocab_size)
        scores = torch.empty(rows, width)
        ids = torch.empty(rows, width, dtype=torch.int64)
        ranked = Ranked(
            rows,
            width,
            *(one.data_ptr() for one in (outputs, normed, logits, scores, ids)),
        )
        self._kernels.head_rank(ctypes.byref(self._head), ctypes.byref(self._shape()), ctypes.byref(ranked))
        return logits, scores, ids

    def grow(
        self,
        outputs: torch.Tensor,
        bases: Sequence[int],
        budgets: Sequence[int],
        cache: KvCache,
        known: torch.Tensor,
        counts: torch.Tensor,
        *,
        width: int,
        levels: int,
    ) -> list[tuple[list[int], list[int]]]:
        """Tokens and parents of every slot's greedy tree, as `services.draft.eagle.growth.grow` has them.

        outputs: [slots, hidden], of the bonus tokens' entries. bases: committed lengths. budgets: nodes that
        each slot may have. known: int64 [entries], physical positions of the slots' valid entries in the
        cache of one layer, slot by slot; counts: int64 [slots], how many each has. width, levels: of the
        trees.
        """

        slots, most = len(bases), max(budgets)
        outputs = outputs.contiguous()
        given = torch.tensor([budgets, bases])
        found = torch.empty(2, slots, most, dtype=torch.int64)
        sizes = torch.empty(slots, dtype=torch.int64)
        growth = Growth(
            slots,
            width,
            levels,
            most,
            given[0].data_ptr(),
            given[1].data_ptr(),
            _indices(self.target_ids),
            outputs.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            _indices(known),
            _indices(counts),
            self._rope.cos.data_ptr(),
            self._rope.sin.data_ptr(),
            found[0].data_ptr(),
            found[1].data_ptr(),
            sizes.data_ptr(),
        )
        what = ctypes.byref(self._head), ctypes.byref(self._shape()), ctypes.byref(growth)
        size = self._kernels.head_growth_bytes(*what)
        if self._workspace.numel() < size:
            self._workspace = torch.empty(size, dtype=torch.uint8)
        self._kernels.head_grow(*what, self._workspace.data_ptr())
        tokens, parents = found.tolist()
        return [(tokens[slot][:size], parents[slot][:size]) for slot, size in enumerate(sizes.tolist())]

    def _shape(self) -> Shape:
        config = self.config
        return Shape(
            layers=1,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_eps,
            scale=config.head_dim**-0.5,
            threads=torch.get_num_threads(),
        )


def _indices(tensor: torch.Tensor) -> int:
    """Where they lie, as the kernels read them. The caller keeps them alive."""

    if tensor.dtype != torch.int64 or not tensor.is_contiguous():
        raise TypeError(f"indices are {tensor.dtype}, strides {tensor.stride()}; contiguous int64 is needed")
    return tensor.data_ptr()


def _norm(weight: torch.Tensor, config: Eagle3Config) -> RmsNorm:
    return RmsNorm(weight.to(DTYPE), config.rms_eps)


def _packed(
    kernels: DecoderKernels,
    memory: HugePages,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    paired: bool,
    wide: bool,
) -> PackedMatrix:
    held = weight.to(DTYPE) if weight.shape[1] % BLOCK_INPUTS else QuantisedBlocks.rounded(weight)
    try:
        return PackedMatrix(kernels, memory, held, bias, wide=wide, paired=paired)
    except ValueError as error:
        raise KernelsUnavailable(str(error)) from error
