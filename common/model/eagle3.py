"""The forward of an EAGLE-3 head (Li et al., 2025, arXiv 2503.01840), but for its attention.

Position t of the head reads the auxiliary state of position t and the embedding of token t + 1, and predicts
token t + 2. What it predicts from afterwards is its own feature, in place of the state, and the next token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.model.eagle3_checkpoint import Eagle3Weights
from common.model.eagle3_config import Eagle3Config
from common.model.layers import GatedMlp, RmsNorm
from common.model.linear import linear
from common.model.rope import RopeTable


class Eagle3Head:
    """Rows never mix: attention lies with the caller, between `queries_keys_values` and `feature`.

    dtype: bfloat16 serves, float32 is for parity tests. embedding: [vocab, hidden], the target's, in dtype;
    used where the head brings none. target_ids: int64 [draft_vocab], the target's id of every draft id.
    max_positions: that the RoPE table has.
    """

    def __init__(
        self,
        config: Eagle3Config,
        weights: Eagle3Weights,
        *,
        dtype: torch.dtype,
        embedding: torch.Tensor,
        max_positions: int,
    ) -> None:
        self.embedding = embedding_of(config, weights, embedding, dtype)

        def norm(weight: torch.Tensor) -> RmsNorm:
            return RmsNorm(weight.to(dtype), config.rms_eps)

        self.config = config
        self.dtype = dtype
        self.target_ids = weights.target_ids
        self._input_norm = None if weights.input_norm is None else norm(weights.input_norm)
        self._fc_norms = tuple(map(norm, weights.fc_norms))
        self._fc = linear(weights.fc, None, dtype)
        self._embedding_norm = norm(weights.input_layernorm)
        self._feature_norm = norm(weights.hidden_norm)
        self._qkv = linear(weights.qkv, weights.qkv_bias, dtype)
        self._output = linear(weights.output, None, dtype)
        self._mlp_norm = norm(weights.post_attention_layernorm)
        self._mlp = GatedMlp(linear(weights.gate_up, None, dtype), linear(weights.down, None, dtype))
        self._norm = norm(weights.norm)
        self._lm_head = linear(weights.lm_head, None, dtype)
        self._rope = RopeTable(config.rope, config.head_dim, max_positions)

    @torch.inference_mode()
    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """The feature of positions whose states are the target's. aux: [rows, aux_size] → [rows, hidden]."""

        return self._fc(fc_input(aux, self._input_norm, self._fc_norms))

    @torch.inference_mode()
    def queries_keys_values(
        self, features: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """features: [rows, hidden]. next_ids: int64 [rows], the token behind each. positions: int64 [rows],
        of the rotation.

        Returns queries [rows, heads, head_dim], rotated and scaled, keys [rows, kv_heads, head_dim], rotated,
        and values of the same shape.
        """

        config = self.config
        embeds = self._embedding_norm(self.embedding.index_select(0, next_ids))
        x = torch.cat([embeds, self._feature_norm(features)], dim=-1)
        qkv = self._qkv(x).view(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        rope = self._rope.rows(positions, config.heads, config.kv_heads)
        rotated = rope.rotate(qkv[:, : config.heads + config.kv_heads], self.dtype)
        return (
            rotated[:, : config.heads],
            rotated[:, config.heads :],
            qkv[:, config.heads + config.kv_heads :],
        )

    @torch.inference_mode()
    def output(self, features: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What the layer makes of it, before the last norm. features: as given to `queries_keys_values`.
        attended: [rows, heads × head_dim]. Returns [rows, hidden]."""

        residual = self._feature_norm(features) if self.config.norm_before_residual else features
        x = residual + self._output(attended)
        return x + self._mlp(self._mlp_norm(x))

    @torch.inference_mode()
    def feature(self, output: torch.Tensor) -> torch.Tensor:
        """The feature of the next draft step, in place of `fuse`."""

        return self._norm(output) if self.config.norm_output else output

    @torch.inference_mode()
    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """float32 [rows, draft_vocab]; `target_ids` says whose they are."""

        logits = self._lm_head(self._norm(output)).float()
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale


def embedding_of(
    config: Eagle3Config, weights: Eagle3Weights, embedding: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The head's own embedding, or the target's where it brings none: [vocab, hidden]. Raises ValueError for
    one of another shape."""

    own = weights.embed_tokens
    chosen = embedding if own is None else own.to(dtype)
    if chosen.shape != (config.vocab_size, config.hidden_size):
        raise ValueError(
            f"the embedding is {list(chosen.shape)}, the head needs"
            f" {[config.vocab_size, config.hidden_size]}; it was made for another target"
        )
    return chosen


def fc_input(aux: torch.Tensor, input_norm: RmsNorm | None, fc_norms: Sequence[RmsNorm]) -> torch.Tensor:
    """aux: [rows, aux_size], behind the norms that the head has: one over all, or one for each state."""

    if input_norm is not None:
        aux = input_norm(aux)
    if fc_norms:
        states = aux.chunk(len(fc_norms), dim=-1)
        aux = torch.cat([norm(state) for norm, state in zip(fc_norms, states, strict=True)], dim=-1)
    return aux
