"""From the `--drafter` setting to a drafter: a known word, or a path dispatched by what lies there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from common.model.catalog import ResolvedModel, resolve_model
from common.model.eagle3_checkpoint import read_eagle3
from common.model.eagle3_config import OTHER_NAMES
from common.model.load import load_model, open_checkpoint
from common.model.tokenizer import load_tokenizer
from common.service import StartupError
from common.settings import AUTO, Settings
from services.draft.drafters.base import Drafter
from services.draft.drafters.draft_model import DraftModelDrafter
from services.draft.drafters.eagle3 import Eagle3Drafter
from services.draft.drafters.lookup_first import LookupFirst
from services.draft.drafters.ngram import NgramDrafter
from services.draft.eagle.growth import Shape

NGRAM, HEAD = "ngram", "eagle3"
LOOKUP_FIRST = f"+{NGRAM}"
SHIPPED_HEADS = Path(__file__).resolve().parents[3] / "models"
UNSUPPORTED_HEADS = frozenset({"LlamaForCausalLMEagle"})
SURE_N = 3
"""Ids that must repeat before a lookup goes before the head: two often repeat by chance."""


def load_drafter(settings: Settings) -> Drafter:
    """Raises StartupError for a drafter that cannot be had."""
    try:
        target = resolve_model(settings.model)
        named = settings.drafter
        if named == AUTO:
            named = HEAD + LOOKUP_FIRST if _place_of_head(target).is_dir() else NGRAM
        if named == NGRAM:
            return _ngram(target, shortest_n=2)
        wanted = named.removesuffix(LOOKUP_FIRST)
        path = _shipped_head(settings, target) if wanted == HEAD else resolve_model(wanted).path
        if not _is_head(path):
            if wanted != named:
                raise StartupError(
                    f"drafter {settings.drafter!r}: {path} is no EAGLE-3 head; "
                    f"only heads take {LOOKUP_FIRST!r}"
                )
            return _draft_model(settings, resolve_model(wanted))
        head = _head(settings, path, target)
        if wanted == named:
            return head
        return LookupFirst(_ngram(target, shortest_n=SURE_N), head)
    except (ValueError, RuntimeError, OSError) as error:
        raise StartupError(f"drafter {settings.drafter!r} cannot be used: {error}") from error


def _ngram(target: ResolvedModel, shortest_n: int) -> NgramDrafter:
    tokenizer = load_tokenizer(target.path)
    return NgramDrafter(tokenizer.vocab_size, tokenizer.fingerprint, shortest_n=shortest_n)


def _place_of_head(target: ResolvedModel) -> Path:
    return SHIPPED_HEADS / f"{target.name}-{HEAD}"


def _shipped_head(settings: Settings, target: ResolvedModel) -> Path:
    path = _place_of_head(target)
    if not path.is_dir():
        raise StartupError(
            f"drafter {settings.drafter!r}: no head ships for {target.name} ({path} is not there); "
            f"give the directory of one, train one with `paceline train-draft`, or take --drafter {NGRAM}"
        )
    return path


def _head(settings: Settings, path: Path, target: ResolvedModel) -> Eagle3Drafter:
    config, weights = read_eagle3(path)
    served = open_checkpoint(target.path).config
    if (config.target_hidden_size, config.vocab_size) != (served.hidden_size, served.vocab_size):
        raise StartupError(
            f"drafter {settings.drafter!r} was made for a target with hidden size "
            f"{config.target_hidden_size} and {config.vocab_size} ids; "
            f"{target.name} has {served.hidden_size} and {served.vocab_size}"
        )
    if weights.embed_tokens is None and config.hidden_size != served.hidden_size:
        raise StartupError(
            f"drafter {settings.drafter!r} brings no embedding, and the target's of {served.hidden_size} "
            f"numbers does not fit its hidden size of {config.hidden_size}"
        )
    tokenizer = load_tokenizer(target.path)
    return Eagle3Drafter(
        path.name,
        config,
        weights,
        layers=config.aux_layers_of(served.layers),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint,
        positions=min(settings.max_model_len, served.max_context),
        shape=Shape(width=min(settings.tree_width, config.draft_vocab_size)),
    )


def _draft_model(settings: Settings, resolved: ResolvedModel) -> DraftModelDrafter:
    tokenizer = load_tokenizer(resolved.path)
    config = open_checkpoint(resolved.path).config
    positions = min(settings.max_model_len, config.max_context)
    model = load_model(resolved.path, dtype=torch.bfloat16, max_positions=positions, weights=settings.weights)
    return DraftModelDrafter(resolved.name, model, tokenizer.vocab_size, tokenizer.fingerprint)


def _is_head(path: Path) -> bool:
    """Raises StartupError for heads of another kind."""
    named = architectures(path)
    if other := UNSUPPORTED_HEADS.intersection(named):
        raise StartupError(f"{path} is a {min(other)} head; {OTHER_NAMES[-1]} heads are supported")
    return bool(set(OTHER_NAMES).intersection(named))


def architectures(path: Path) -> list[str]:
    """What a Hugging Face directory's config.json names; nothing for a GGUF file. Raises ValueError."""

    class Config(msgspec.Struct):
        architectures: list[str] = []

    if path.is_file():
        return []
    return msgspec.json.decode((path / "config.json").read_bytes(), type=Config).architectures
