"""From the `--drafter` setting to a drafter: a known word, or a model dispatched by its architectures."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from common.model.catalog import resolve_model
from common.model.load import load_model, open_checkpoint
from common.model.tokenizer import load_tokenizer
from common.service import StartupError
from common.settings import Settings
from services.draft.drafters.base import Drafter
from services.draft.drafters.draft_model import DraftModelDrafter
from services.draft.drafters.ngram import NgramDrafter

HEAD_ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"})


def load_drafter(settings: Settings) -> Drafter:
    """Raises StartupError for a drafter that cannot be had."""
    try:
        if settings.drafter == "ngram":
            tokenizer = load_tokenizer(resolve_model(settings.model).path)
            return NgramDrafter(tokenizer.vocab_size, tokenizer.fingerprint)
        return _draft_model(settings)
    except (ValueError, RuntimeError, OSError) as error:
        raise StartupError(f"drafter {settings.drafter!r} cannot be used: {error}") from error


def _draft_model(settings: Settings) -> DraftModelDrafter:
    resolved = resolve_model(settings.drafter)
    heads = HEAD_ARCHITECTURES.intersection(architectures(resolved.path))
    if heads:
        raise StartupError(
            f"drafter {settings.drafter!r} is a {min(heads)} head; this version serves ngram and standalone "
            "draft models"
        )
    tokenizer = load_tokenizer(resolved.path)
    config = open_checkpoint(resolved.path).config
    positions = min(settings.max_model_len, config.max_context)
    model = load_model(resolved.path, dtype=torch.bfloat16, max_positions=positions)
    return DraftModelDrafter(resolved.name, model, tokenizer.vocab_size, tokenizer.fingerprint)


def architectures(path: Path) -> list[str]:
    """What a Hugging Face directory's config.json names; nothing for a GGUF file. Raises ValueError."""

    class Config(msgspec.Struct):
        architectures: list[str] = []

    if path.is_file():
        return []
    return msgspec.json.decode((path / "config.json").read_bytes(), type=Config).architectures
