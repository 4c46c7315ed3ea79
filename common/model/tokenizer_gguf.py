"""A tokenizer from the metadata of a GGUF file: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

Keys: ggml-org/ggml, docs/gguf.md. How text is split before BPE is only named there
(`tokenizer.ggml.pre`); the patterns are those of the models' own tokenizer.json, by llama.cpp's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.model.chat_template import ChatTemplate
from common.model.gguf_metadata import read_gguf_metadata
from common.model.vocabulary import WORD_BORDER, TokenizerParts, byte_level_piece, sentencepiece_piece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""tokenizer.ggml.token_type"""

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CASELESS_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
LINES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """patterns: applied in turn, each to what the one before left, cutting out its matches.
    nfc: Unicode composition first. whole_words: a word that is a token is not put together by merges.
    adds_bos: when the file does not say."""

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_LLAMA3 = PreTokenizer((CASELESS_WORDS + "{1,3}" + LINES,), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((CASELESS_WORDS + LINES,), nfc=True)
_GPT2 = PreTokenizer((WORDS,))

PRE_TOKENIZERS = {
    "smollm": PreTokenizer((r"\p{N}", WORDS)),
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer((CASED_WORDS,), whole_words=True, adds_bos=True),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def read_gguf(path: Path) -> TokenizerParts:
    """Raises ValueError when the metadata is damaged or names a tokenizer that is not supported."""
    metadata = read_gguf_metadata(path, lambda key: key.startswith("tokenizer."))
    try:
        return _build(metadata)
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]} in its metadata") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _build(metadata: dict[str, Any]) -> TokenizerParts:
    kind = metadata["tokenizer.ggml.model"]
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"{len(types)} token types for {len(tokens)} tokens")
    ids = {
        name: token_id
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
        if (token_id := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    for name, token_id in ids.items():
        if not 0 <= token_id < len(tokens):
            raise ValueError(f"{name}_token_id is {token_id}, the vocabulary has {len(tokens)} tokens")
    bos_id = ids.get("bos")
    eos_ids = frozenset(ids[name] for name in ("eos", "eot", "eom") if name in ids)
    special_ids = frozenset(i for i, kind in enumerate(types) if kind == CONTROL) | eos_ids
    if bos_id is not None:
        special_ids |= {bos_id}

    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, tokens)
        to_bytes = byte_level_piece
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, tokens, types, ids.get("unknown"))
        to_bytes = sentencepiece_piece
        special_ids |= {i for i, kind in enumerate(types) if kind == UNKNOWN}
    else:
        raise ValueError(f"tokenizer model {kind!r} is not supported (supported: gpt2, llama)")
    backend.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special_ids)]
    )
    written_out = [i for i, kind in enumerate(types) if kind == USER_DEFINED and i not in special_ids]
    backend.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in written_out])
    if bos_id is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)]
        )

    pieces = {token_id: to_bytes(token) for token_id, token in enumerate(tokens)}
    pieces |= {token_id: tokens[token_id].encode("utf-8") for token_id in [*special_ids, *written_out]}
    template = metadata.get("tokenizer.chat_template")
    names = {f"{name}_token": tokens[token_id] for name, token_id in ids.items()}
    return TokenizerParts(
        backend=backend,
        tokens={
            token_id: token
            for token_id, token in enumerate(tokens)
            if not _is_padding(token, types[token_id])
        },
        pieces=pieces,
        special_ids=special_ids,
        bos_id=bos_id,
        eos_ids=eos_ids,
        chat_template=None if template is None else ChatTemplate(template, names),
        starts_with_space=kind == "llama" and metadata.get("tokenizer.ggml.add_space_prefix", True),
    )


def _is_padding(token: str, kind: int) -> bool:
    """Filler up to the embedding's height, which other forms of the vocabulary do not have."""
    return kind == UNUSED and token.startswith("[PAD")


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ValueError(f"pre-tokenizer {name!r} is not supported (supported: {', '.join(PRE_TOKENIZERS)})")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = _bpe(tokens, merges, ignore_merges=pre.whole_words)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(
    metadata: dict[str, Any], tokens: list[str], types: list[int], unknown_id: int | None
) -> tuple[Tokenizer, bool]:
    scores: list[float] = metadata["tokenizer.ggml.scores"]
    if len(scores) != len(tokens):
        raise ValueError(f"{len(scores)} scores for {len(tokens)} tokens")
    unknown = None if unknown_id is None else tokens[unknown_id]
    mergeable = {
        token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL
    }
    merges = _merges_by_score(mergeable)
    backend = _bpe(tokens, merges, byte_fallback=BYTE in types, unk_token=unknown, fuse_unk=True)
    steps: list[Any] = [normalizers.Replace(" ", WORD_BORDER)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(WORD_BORDER))
    backend.normalizer = normalizers.Sequence(steps)
    return backend, True


def _merges_by_score(scores: dict[str, float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: all splits of a token, best token first."""
    merges = [
        (score, len(token) - cut, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    merges.sort(key=lambda merge: (-merge[0], merge[1]))
    return [(left, right) for _, _, left, right in merges]


def _bpe(tokens: list[str], merges: list[Any], **options: Any) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises the bare class
        raise ValueError(f"the vocabulary and its merges do not fit: {error}") from error
