"""What an EAGLE-3 head is made of, from and to the published `config.json` (`LlamaForCausalLMEagle3`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.model.config import MAX_HEAD_DIM, RopeConfig, UnsupportedModelError
from common.model.config_hf import parse_rope, positive

ARCHITECTURE = "LlamaForCausalLMEagle3"
OTHER_NAMES = ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")
"""Names under which heads of this form are published."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shapes and switches of one head.

    vocab_size, target_hidden_size: the target's. aux_layers: target layers whose entering residual stream the
    head reads, empty where the checkpoint leaves them to the rule of `default_aux_layers`. norm_before_fc:
    one norm over the auxiliary states side by side. fc_norm: one for each of them. norm_before_residual: the
    residual is the feature behind `hidden_norm`. norm_output: the next step's feature is the output behind
    `norm`. logit_scale: factor of the logits.
    """

    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    max_context: int
    aux_layers: tuple[int, ...] = ()
    aux_count: int = 3
    attention_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(
                f"{self.heads} heads do not divide into {self.kv_heads} key/value heads"
            )
        if self.head_dim % 8 or self.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"head_dim is {self.head_dim}; multiples of 8 up to {MAX_HEAD_DIM} are supported"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise UnsupportedModelError(
                f"draft_vocab_size {self.draft_vocab_size} is above vocab_size {self.vocab_size}"
            )
        if self.aux_layers and len(self.aux_layers) != self.aux_count:
            raise UnsupportedModelError(
                f"{len(self.aux_layers)} auxiliary layers are named, the head reads {self.aux_count}"
            )

    @property
    def aux_size(self) -> int:
        """Numbers per position that the head reads of the target."""

        return self.aux_count * self.target_hidden_size

    def aux_layers_of(self, target_layers: int) -> tuple[int, ...]:
        """For a target with so many layers. Raises UnsupportedModelError for layers that it does not have."""

        layers = self.aux_layers or default_aux_layers(target_layers)
        if len(layers) != self.aux_count or not all(0 <= layer < target_layers for layer in layers):
            raise UnsupportedModelError(
                f"the head reads {self.aux_count} states, of layers {list(layers)}; the target has layers"
                f" 0 … {target_layers - 1}"
            )
        return layers


def default_aux_layers(target_layers: int) -> tuple[int, ...]:
    """Early, middle and late: the layers that EAGLE-3 reads where a checkpoint does not say."""

    if target_layers < 6:
        raise UnsupportedModelError(
            f"the target has {target_layers} layers; the rule for auxiliary layers needs 6 or more: name them"
            " in eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    return (2, target_layers // 2, target_layers - 3)


def parse_eagle3_config(raw: Mapping[str, Any]) -> Eagle3Config:
    """raw: the parsed `config.json`. Raises UnsupportedModelError naming what is missing or not supported."""

    architectures = raw.get("architectures") or []
    if not any(name in OTHER_NAMES for name in architectures):
        named = ", ".join(map(str, architectures)) or "no architecture"
        raise UnsupportedModelError(f"{named} is not an EAGLE-3 head; {ARCHITECTURE} is")
    if raw.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModelError(
            f"config.json: num_hidden_layers is {raw['num_hidden_layers']}; heads of one layer are supported"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; only 'silu' is")
    if raw.get("mlp_bias"):
        raise UnsupportedModelError("config.json: mlp_bias is not supported in an EAGLE-3 head")
    eagle = raw.get("eagle_config") or {}
    if not isinstance(eagle, Mapping):
        raise UnsupportedModelError(f"config.json: eagle_config is {eagle!r}; an object is needed")
    if not eagle.get("use_aux_hidden_state", True):
        raise UnsupportedModelError(
            "config.json: use_aux_hidden_state is false; only heads that read auxiliary states are supported"
        )
    layers = _layers(raw, eagle)
    heads, hidden = positive(raw, "num_attention_heads"), positive(raw, "hidden_size")
    head_dim = _optional(raw, "head_dim", hidden // heads)
    vocab_size = positive(raw, "vocab_size")
    return Eagle3Config(
        vocab_size=vocab_size,
        draft_vocab_size=_optional(raw, "draft_vocab_size", vocab_size),
        target_hidden_size=_optional(raw, "target_hidden_size", hidden),
        hidden_size=hidden,
        intermediate_size=positive(raw, "intermediate_size"),
        heads=heads,
        kv_heads=_optional(raw, "num_key_value_heads", heads),
        head_dim=head_dim,
        rms_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=parse_rope(raw, head_dim),
        max_context=positive(raw, "max_position_embeddings"),
        aux_layers=layers,
        aux_count=_optional(raw, "num_aux_hidden_states", len(layers) or 3),
        attention_bias=bool(raw.get("attention_bias", False)),
        norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_output=bool(raw.get("norm_output", False)),
        logit_scale=_number(raw, "logit_scale", 1.0),
    )


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < float("inf"):
        raise UnsupportedModelError(f"config.json: {key} is {value!r}; a positive number is needed")
    return float(value)


def eagle3_config_json(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """What `parse_eagle3_config` and the loaders of other servers read. dtype: of the weights. Raises
    UnsupportedModelError for RoPE divisors, which have no published spelling here."""

    if config.rope.divisors:
        raise UnsupportedModelError(
            "a head with scaled RoPE frequencies cannot be written; use the plain ones"
        )
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_context,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }
    if config.aux_layers:
        raw["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
            "use_aux_hidden_state": True,
        }
    else:
        raw["num_aux_hidden_states"] = config.aux_count
    for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"):
        if getattr(config, name):
            raw[name] = True
    if config.logit_scale != 1.0:
        raw["logit_scale"] = config.logit_scale
    return raw


def _layers(raw: Mapping[str, Any], eagle: Mapping[str, Any]) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    value = eagle.get(key) or raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        raise UnsupportedModelError(f"config.json: {key} is {value!r}; a list of layer numbers is needed")
    return tuple(value)


def _optional(raw: Mapping[str, Any], key: str, default: int) -> int:
    return default if raw.get(key) is None else positive(raw, key)
