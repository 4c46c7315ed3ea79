"""A tokenizer from a Hugging Face directory: tokenizer.json and the configurations beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from common.model.chat_template import ChatTemplate
from common.model.vocabulary import TokenizerParts, byte_level_piece, sentencepiece_piece


def read_directory(folder: Path) -> TokenizerParts:
    """Raises ValueError when tokenizer.json is missing, damaged or decodes in a way that is not supported."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json (a tokenizer in another form has to be converted: load it with "
            "transformers and save it with save_pretrained)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class
        raise ValueError(f"{path} cannot be read: {error}") from error
    decoders = list(_decoders(json.loads(path.read_text("utf-8")).get("decoder")))
    to_bytes = _piece_reader(decoders, path)
    added = backend.get_added_tokens_decoder()
    tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    pieces = {token_id: to_bytes(token) for token_id, token in tokens.items()}
    pieces |= {token_id: token.content.encode("utf-8") for token_id, token in added.items()}

    config = _read_json(folder / "tokenizer_config.json")
    model_configs = [_read_json(folder / name) for name in ("generation_config.json", "config.json")]
    names = _special_names(config)
    bos_id = backend.token_to_id(names.get("bos_token", ""))
    if bos_id is None:
        bos_id = next(iter(_ids(model_configs, "bos_token_id")), None)
    eos_ids = set(_ids(model_configs, "eos_token_id"))
    if (eos_id := backend.token_to_id(names.get("eos_token", ""))) is not None:
        eos_ids.add(eos_id)
    source = _chat_template_source(folder, config)
    return TokenizerParts(
        backend=backend,
        tokens=tokens,
        pieces=pieces,
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        bos_id=bos_id,
        eos_ids=frozenset(eos_ids),
        chat_template=None if source is None else ChatTemplate(source, names),
        starts_with_space=any(decoder["type"] == "Strip" and decoder.get("start") for decoder in decoders)
        or any(decoder["type"] == "Metaspace" and _prepends(decoder) for decoder in decoders),
    )


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoders(part)
    else:
        yield decoder


def _piece_reader(decoders: list[dict[str, Any]], path: Path) -> Callable[[str], bytes]:
    kinds = [decoder["type"] for decoder in decoders]
    if "ByteLevel" in kinds:
        return byte_level_piece
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return sentencepiece_piece
    raise ValueError(f"{path} decodes with {kinds}: byte-level and SentencePiece vocabularies are supported")


def _prepends(metaspace: dict[str, Any]) -> bool:
    return (
        metaspace.get("prepend_scheme", "always") != "never"
        and metaspace.get("add_prefix_space") is not False
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _special_names(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … by name; a value is a string or an object with `content`."""
    names = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            names[key] = text
    return names


def _ids(configs: list[dict[str, Any]], key: str) -> Iterator[int]:
    for config in configs:
        value = config.get(key)
        yield from value if isinstance(value, list) else [] if value is None else [value]


def _chat_template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """The default template: chat_template.jinja, chat_template.json or an entry of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    source = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return source if isinstance(source, str) else None
