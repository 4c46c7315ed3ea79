"""Random EAGLE-3 heads, and a plain float32 forward of them written from the format's description alone."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from common.model.config import RopeConfig
from common.model.eagle3_checkpoint import Eagle3Weights
from common.model.eagle3_config import Eagle3Config

VOCAB, DRAFT_VOCAB, TARGET_HIDDEN = 40, 11, 24
PLAIN = Eagle3Config(
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
    target_hidden_size=TARGET_HIDDEN,
    hidden_size=16,
    intermediate_size=20,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rms_eps=1e-5,
    rope=RopeConfig(10000.0),
    max_context=64,
    aux_layers=(1, 2, 4),
)
VARIANTS = {
    "plain": PLAIN,
    "biases": replace(PLAIN, attention_bias=True),
    "norm-before-fc": replace(PLAIN, norm_before_fc=True),
    "fc-norm": replace(PLAIN, fc_norm=True),
    "norm-before-residual": replace(PLAIN, norm_before_residual=True),
    "norm-output": replace(PLAIN, norm_output=True),
    "whole-vocabulary": replace(PLAIN, draft_vocab_size=VOCAB),
    "scaled-logits": replace(PLAIN, logit_scale=0.5),
    "unnamed-layers": replace(PLAIN, aux_layers=()),
}


def random_weights(config: Eagle3Config, seed: int = 0, *, embedding: bool = False) -> Eagle3Weights:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    return Eagle3Weights(
        fc=matrix(hidden, config.aux_size),
        input_layernorm=norm(hidden),
        hidden_norm=norm(hidden),
        qkv=matrix(query + 2 * key, 2 * hidden),
        output=matrix(hidden, query),
        post_attention_layernorm=norm(hidden),
        gate_up=matrix(2 * inner, hidden),
        down=matrix(hidden, inner),
        norm=norm(hidden),
        lm_head=matrix(config.draft_vocab_size, hidden),
        d2t=ids - torch.arange(config.draft_vocab_size),
        qkv_bias=matrix(query + 2 * key) if config.attention_bias else None,
        input_norm=norm(config.aux_size) if config.norm_before_fc else None,
        fc_norms=tuple(norm(config.target_hidden_size) for _ in range(3 * config.fc_norm)),
        embed_tokens=matrix(config.vocab_size, hidden) if embedding else None,
    )


class PlainDrafter:
    """One sequence, one position at a time, every key and value kept in a list. No code of the project."""

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights, embedding: torch.Tensor) -> None:
        self.config, self.w = config, weights
        self.embedding = embedding if weights.embed_tokens is None else weights.embed_tokens
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_eps) * weight

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        if self.w.input_norm is not None:
            aux = self.norm(aux, self.w.input_norm)
        if self.w.fc_norms:
            parts = aux.split(self.config.target_hidden_size)
            aux = torch.cat([self.norm(part, w) for part, w in zip(parts, self.w.fc_norms, strict=True)])
        return self.w.fc @ aux

    def rotate(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        half = self.config.head_dim // 2
        out = torch.empty_like(heads)
        for i in range(half):
            angle = position / self.config.rope.theta ** (2 * i / self.config.head_dim)
            a, b = heads[:, i], heads[:, i + half]
            out[:, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def step(self, feature: torch.Tensor, next_id: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the draft vocabulary, and the feature of the next draft step."""

        c, w = self.config, self.w
        e = self.norm(self.embedding[next_id], w.input_layernorm)
        h = self.norm(feature, w.hidden_norm)
        qkv = w.qkv @ torch.cat([e, h])
        if w.qkv_bias is not None:
            qkv = qkv + w.qkv_bias
        heads = qkv.view(-1, c.head_dim)
        q = self.rotate(heads[: c.heads], position)
        self.keys.append(self.rotate(heads[c.heads : c.heads + c.kv_heads], position))
        self.values.append(heads[c.heads + c.kv_heads :])
        mixed = []
        for head in range(c.heads):
            group = head // (c.heads // c.kv_heads)
            scores = torch.stack([(q[head] * k[group]).sum() for k in self.keys]) / math.sqrt(c.head_dim)
            shares = torch.softmax(scores, 0)
            mixed.append(sum(s * v[group] for s, v in zip(shares, self.values, strict=True)))
        r = (h if c.norm_before_residual else feature) + w.output @ torch.cat(mixed)
        gate, up = (w.gate_up @ self.norm(r, w.post_attention_layernorm)).chunk(2)
        y = r + w.down @ (gate * torch.sigmoid(gate) * up)
        normed = self.norm(y, w.norm)
        return w.lm_head @ normed * c.logit_scale, normed if c.norm_output else y
