"""Tokenizers from GGUF metadata and from tokenizer.json, against transformers and against naive BPE."""

import json
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from common.model.gguf_metadata import read_gguf_metadata
from common.model.tokenizer import Tokenizer, load_tokenizer
from common.model.tokenizer_gguf import PRE_TOKENIZERS
from common.model.vocabulary import byte_level_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three \t tab\n\n\nlines\r\n end ",
    "It's we'll they'RE I'D don't",
    "1 22 333 4444 1,234,567.89 ٣٤٥ ½ Ⅷ 一二三",
    "naïve café Straße ΑΒΓ привет שלום مرحبا नमस्ते ไทย",
    "日本語のテキスト、中文，한국어",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\u00a0\ufeff",
    "def f(x):\n    return x**2  # comment\n\t\t{}[]<>|\\/",
    "CamelCase HTTPServer iPhone ÉCOLE ǅungla",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>x<|im_start|",
    "\x00\x01\x7f",
]

# Without the characters whose bytes have no token in the demo vocabulary.
encodable = st.characters(
    max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d"
)
any_text = st.text(st.one_of(encodable, st.sampled_from(" \n\t'sSré1٣中🙂A")), max_size=30)


@pytest.fixture(scope="module")
def demo(demo_gguf: Path) -> Tokenizer:
    return load_tokenizer(demo_gguf)


@pytest.fixture(scope="module")
def demo_metadata(demo_gguf: Path) -> dict[str, Any]:
    return read_gguf_metadata(demo_gguf, lambda key: key.startswith("tokenizer."))


def write_gguf(path: Path, **values: Any) -> Path:
    """A GGUF file without tensors. Keys are those of `tokenizer.ggml.…`, chat_template aside."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


class NaiveBpe:
    """Byte-level BPE as the words have it: cut by patterns, then join the pair that was learnt first."""

    def __init__(self, tokens: list[str], merges: list[str], specials: list[str], pre: str) -> None:
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.specials = regex.compile("(" + "|".join(map(regex.escape, specials)) + ")")
        self.patterns = [regex.compile(pattern) for pattern in PRE_TOKENIZERS[pre].patterns]
        self.whole_words, self.nfc = PRE_TOKENIZERS[pre].whole_words, PRE_TOKENIZERS[pre].nfc
        self.alphabet = {byte: char for char, byte in byte_level_alphabet().items()}

    def encode(self, text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        ids = []
        for index, part in enumerate(self.specials.split(text)):
            ids += [self.ids[part]] if index % 2 else self.plain(part)
        return ids

    def plain(self, text: str) -> list[int]:
        words = [text]
        for pattern in self.patterns:
            words = [piece for word in words for piece in self.cut(pattern, word)]
        return [token_id for word in words for token_id in self.word(word)]

    @staticmethod
    def cut(pattern: regex.Pattern, word: str) -> Iterable[str]:
        at = 0
        for match in pattern.finditer(word):
            yield from (piece for piece in (word[at : match.start()], match.group()) if piece)
            at = match.end()
        yield from [word[at:]] if at < len(word) else []

    def word(self, word: str) -> list[int]:
        symbols = [self.alphabet[byte] for byte in word.encode()]
        if self.whole_words and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        while len(symbols) > 1:
            rank, at = min(
                (self.ranks.get((symbols[i], symbols[i + 1]), 1 << 30), i) for i in range(len(symbols) - 1)
            )
            if rank == 1 << 30:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.ids[symbol] for symbol in symbols]


def test_the_demo_tokenizer_equals_transformers(demo: Tokenizer, demo_metadata: dict[str, Any]) -> None:
    from transformers import GPT2Tokenizer

    tokens = demo_metadata["tokenizer.ggml.tokens"]
    theirs = GPT2Tokenizer(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in demo_metadata["tokenizer.ggml.merges"]],
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=tokens[:17],
    )
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        ids = demo.encode(text, add_special=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert [demo.token_bytes(i).decode("utf-8", "replace") for i in ids] == [
            theirs.decode([i]) for i in ids
        ]
        assert demo.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False) == text


@settings(max_examples=300, deadline=None, derandomize=True)
@given(any_text)
def test_text_comes_back_from_its_tokens(demo: Tokenizer, text: str) -> None:
    ids = demo.encode(text, add_special=True)
    assert demo.decode(ids) == text
    assert b"".join(map(demo.token_bytes, ids)) == text.encode()


@pytest.fixture(scope="module", params=["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken", "default"])
def named(request, demo_metadata: dict[str, Any], tmp_path_factory) -> tuple[Tokenizer, NaiveBpe]:
    """The demo vocabulary under each pre-tokenizer, as a file and naively."""
    keep = ("tokens", "merges", "token_type", "bos_token_id", "eos_token_id")
    values = {key: demo_metadata[f"tokenizer.ggml.{key}"] for key in keep}
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "v.gguf", model="gpt2", pre=request.param, **values)
    specials = values["tokens"][:17]
    return load_tokenizer(path), NaiveBpe(values["tokens"], values["merges"], specials, request.param)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(any_text)
def test_every_pre_tokenizer_equals_naive_bpe(named: tuple[Tokenizer, NaiveBpe], text: str) -> None:
    ours, naive = named
    for each in [*TEXTS, text]:
        assert ours.encode(each, add_special=False) == naive.encode(each)


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "tekken"])
def test_patterns_are_those_that_transformers_knows(pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    assert PRE_TOKENIZERS[pre].patterns == (GGUF_PRE_TOKENIZER_SPLITS[pre],)


def test_bytes_without_a_token_are_dropped(demo: Tokenizer) -> None:
    assert demo.decode(demo.encode("a\x04b", add_special=False)) == "ab"


def test_other_threads_run_while_a_long_text_is_encoded(demo: Tokenizer) -> None:
    text = " ".join(f"{number} bottles of beer on the wall," for number in range(20_000))
    worker = threading.Thread(target=lambda: demo.encode(text, add_special=False))
    worker.start()
    turns = 0
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10


def test_what_the_demo_file_says_of_itself(demo: Tokenizer) -> None:
    assert (demo.vocab_size, demo.bos_id, demo.eos_ids) == (49_152, 1, {2})
    assert demo.is_special(2)
    assert not demo.is_special(100)
    assert demo.token_bytes(49_152) == demo.token_bytes(-1) == b""
    assert demo.token_bytes(1) == b"<|im_start|>"
    assert demo.chat_template is not None


def test_the_metadata_reader_reads_what_gguf_writes(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", model="llama", tokens=["a", "é", ""], scores=[0.5, -1.0, 0.0],
        token_type=[1, 3, 6], bos_token_id=7, add_bos_token=True,
    )  # fmt: skip
    assert read_gguf_metadata(path, lambda key: key.startswith("tokenizer")) == {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "é", ""],
        "tokenizer.ggml.scores": [0.5, -1.0, 0.0],
        "tokenizer.ggml.token_type": [1, 3, 6],
        "tokenizer.ggml.bos_token_id": 7,
        "tokenizer.ggml.add_bos_token": True,
    }


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    whole = write_gguf(tmp_path / "m.gguf", model="gpt2", tokens=["a", "bc"]).read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"broken\.gguf"):
            read_gguf_metadata(path, lambda key: True)
    path.write_bytes(b"GGUF" + b"\xff" * 60)
    with pytest.raises(ValueError, match=r"broken\.gguf"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"pre": "kimi-k2"}, "pre-tokenizer 'kimi-k2' is not supported"),
        ({"merges": ["a x"]}, "do not fit"),
        ({"eos_token_id": 9}, "eos_token_id is 9, the vocabulary has 3"),
        ({"token_type": [1]}, "1 token types for 3 tokens"),
        ({"model": "llama"}, r"no tokenizer\.ggml\.scores"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    path = write_gguf(tmp_path / "m.gguf", **(values | changed))
    with pytest.raises(ValueError, match=words) as refused:
        load_tokenizer(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(("pre", "ids"), [("gpt-2", [2, 0]), ("llama-bpe", [3])])
def test_a_word_that_is_a_token_is_kept_whole_where_the_model_does(
    pre: str, ids: list[int], tmp_path: Path
) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", model="gpt2", pre=pre, tokens=["a", "b", "ab", "aba"], merges=["a b"]
    )
    assert load_tokenizer(path).encode("aba", add_special=False) == ids


SPM_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> tuple[Tokenizer, Callable[[str], list[int]]]:
    """A SentencePiece vocabulary of ▁, a, b, é and unions of them, and its algorithm done naively."""
    words = ["▁", "a", "b", "é", "▁a", "ab", "▁ab", "aba", "bb", "▁b", "éa", "b▁", "ba"]
    tokens = ["<unk>", "<s>", "</s>", *SPM_BYTES, *words]
    scores = [0.0] * 259 + [-20.0 - i if len(word) == 1 else -float(i) for i, word in enumerate(words)]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words)
    path = write_gguf(
        tmp_path_factory.mktemp("spm") / "spm.gguf", model="llama", tokens=tokens, scores=scores,
        token_type=types, bos_token_id=1, eos_token_id=2, unknown_token_id=0,
    )  # fmt: skip
    score = dict(zip(tokens[259:], scores[259:], strict=True))

    def naive(text: str) -> list[int]:
        symbols = list("▁" + text.replace(" ", "▁")) if text else []
        while True:
            pairs = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
            if not pairs:
                break
            _, at = min(pairs)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        ids = []
        for symbol in symbols:
            ids += [tokens.index(symbol)] if symbol in score else [3 + byte for byte in symbol.encode()]
        return ids

    return load_tokenizer(path), naive


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("aabb é日🙂\n"), max_size=14))
def test_sentencepiece_bpe_equals_its_naive_form(
    sentencepiece: tuple[Tokenizer, Callable[[str], list[int]]], text: str
) -> None:
    ours, naive = sentencepiece
    assert ours.encode(text, add_special=False) == naive(text)
    assert ours.decode(ours.encode(text, add_special=False)) == text
    assert ours.encode(text, add_special=True) == [1, *naive(text)]


def test_sentencepiece_pieces_are_bytes(sentencepiece: tuple[Tokenizer, Callable[[str], list[int]]]) -> None:
    ours, _ = sentencepiece
    assert ours.token_bytes(3 + 0xE6) == b"\xe6"
    assert [ours.token_bytes(i) for i in ours.encode("ab日", add_special=False)] == [
        b" ab",
        b"\xe6",
        b"\x97",
        b"\xa5",
    ]
    assert ours.token_bytes(2) == b"</s>"
    assert ours.is_special(0)


VOCAB = {
    "<s>": 0,
    "</s>": 1,
    "a": 2,
    "b": 3,
    "Ġ": 4,
    "ab": 5,
    "Ġab": 6,
    "Ã": 7,
    "©": 8,
    "<é>": 9,
    "</turn>": 10,
}
MERGES = [("a", "b"), ("Ġ", "ab")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A Hugging Face directory with a byte-level vocabulary that puts BOS first."""
    backend = tokenizers.Tokenizer(models.BPE(VOCAB, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "</turn>"])
    backend.add_tokens(["<é>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}ab"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 10]}))
    return tmp_path


def test_a_directory_gives_ids_specials_and_ends(directory: Path) -> None:
    ours = load_tokenizer(directory)
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (11, 0, {1, 10})
    assert ours.encode("ab ab<é>é</turn>", add_special=True) == [0, 5, 6, 9, 7, 8, 10]
    assert ours.decode([0, 5, 6, 9, 7, 8, 10]) == "<s>ab ab<é>é</turn>"
    assert [ours.token_bytes(i) for i in (6, 7, 8, 9)] == [b" ab", b"\xc3", b"\xa9", "<é>".encode()]
    assert [i for i in range(11) if ours.is_special(i)] == [0, 1, 10]


def test_bos_is_not_doubled(directory: Path) -> None:
    ours = load_tokenizer(directory)
    assert ours.encode("ab", add_special=True) == [0, 5]
    assert ours.encode("<s>ab", add_special=True) == [0, 5]
    rendered = ours.chat_template.render([], add_generation_prompt=True)
    assert ours.encode(rendered, add_special=False) == [0, 5]


def test_both_forms_of_a_vocabulary_have_one_fingerprint(directory: Path) -> None:
    tokens = [*sorted(VOCAB, key=VOCAB.__getitem__), "[PAD11]"]
    types = [CONTROL, CONTROL] + [NORMAL] * 7 + [USER_DEFINED, CONTROL, UNUSED]
    path = write_gguf(
        directory / "m.gguf", model="gpt2", pre="gpt-2", tokens=tokens, token_type=types,
        merges=[" ".join(pair) for pair in MERGES], bos_token_id=0, eos_token_id=1, eot_token_id=10,
        add_bos_token=True, chat_template="{{ bos_token }}{{ eos_token }}",
    )  # fmt: skip
    ours, theirs = load_tokenizer(path), load_tokenizer(directory)
    assert ours.fingerprint == theirs.fingerprint
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_id, theirs.eos_ids)
    assert ours.chat_template.render([], add_generation_prompt=False) == "<s></s>"
    for text in ("<s>ab", "ab ab<é>é</turn>"):
        assert ours.encode(text, add_special=True) == theirs.encode(text, add_special=True)
    types[5], tokens[5] = NORMAL, "bb"
    other = write_gguf(
        directory / "n.gguf", model="gpt2", pre="gpt-2", tokens=tokens, token_type=types, merges=["b b"]
    )
    assert load_tokenizer(other).fingerprint != ours.fingerprint


def test_a_sentencepiece_directory_drops_the_space_that_it_adds(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, **{byte: 1 + i for i, byte in enumerate(SPM_BYTES)}, "▁": 257, "a": 258, "▁a": 259}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours.encode("a a日", add_special=True) == [259, 259, 1 + 0xE6, 1 + 0x97, 1 + 0xA5]
    assert (
        ours.decode([259, 259, 1 + 0xE6, 1 + 0x97, 1 + 0xA5])
        == backend.decode([259, 259, 231, 152, 166])
        == "a a日"
    )
    assert ours.token_bytes(259) == b" a"


def test_a_directory_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="byte-level and SentencePiece vocabularies are supported"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="neither a directory nor a file"):
        load_tokenizer(tmp_path / "nothing")


def test_tokenizers_and_text_do_not_load_torch() -> None:
    code = "import sys, common.model.tokenizer, services.gateway.text; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
