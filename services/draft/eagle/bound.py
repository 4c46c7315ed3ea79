"""Which forward a head gets, and which attention each of its passes."""

from __future__ import annotations

import logging
from typing import Any

import torch

from common.attention.kv_cache import KvCache
from common.kernels.build import KernelsUnavailable
from common.model.eagle3 import Eagle3Head
from common.model.eagle3_checkpoint import Eagle3Weights
from common.model.eagle3_compiled import CompiledHead
from common.model.eagle3_config import Eagle3Config
from services.draft.eagle.attention import DecodeAttention, ExtendAttention
from services.draft.eagle.compiled import CompiledForward, DecodeKeys, ExtendKeys
from services.draft.eagle.forward import EagleForward, HeadForward

log = logging.getLogger(__name__)


def bound_forward(
    config: Eagle3Config, weights: Eagle3Weights, embedding: torch.Tensor, positions: int, cache: KvCache
) -> HeadForward[Any]:
    """The compiled kernels where they can be had, else plain torch. embedding: bfloat16 [vocab, hidden], the
    target's. positions: longest that are rotated. cache: bfloat16, one layer."""

    try:
        compiled = CompiledHead(config, weights, embedding=embedding, max_positions=positions)
    except KernelsUnavailable as error:
        log.warning("the head drafts without the compiled kernels, which is slower: %s", error)
        plain = Eagle3Head(
            config, weights, dtype=torch.bfloat16, embedding=embedding, max_positions=positions
        )
        return EagleForward(plain, cache, ExtendAttention(), DecodeAttention())
    return CompiledForward(compiled, cache, ExtendKeys(), DecodeKeys())
