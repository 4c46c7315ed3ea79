"""The bounds of a request, and the seeds of its choices."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import TinyTokenizer

from services.gateway.admission import (
    DRAWN_SEED_BITS,
    MAX_ERROR_CHARS,
    MAX_INT32,
    GenerationParams,
    RequestError,
    build_spec,
    choice_seed,
    encode_messages,
    encode_text,
    fix_seed,
    refusal,
)
from services.gateway.engine import AdmissionError, EngineInfo

INFO = EngineInfo(model="tiny", max_model_len=16, vocab_size=100, drafter="none", created=0)


def spec(prompt_ids=(1, 2), choice=0, **params):
    return build_spec(INFO, prompt_ids, GenerationParams(**params), seed=0, choice=choice)


def refused(**params) -> RequestError:
    with pytest.raises(RequestError) as error:
        spec(**params)
    return error.value


def test_defaults_fill_the_context():
    built = spec()
    assert built.max_tokens == 14
    assert (built.sampling.temperature, built.sampling.top_p) == (1.0, 1.0)
    assert (built.sampling.top_k, built.sampling.min_p) == (0, 0.0)
    assert (built.stop, built.stop_token_ids, built.ignore_eos, built.priority) == ((), (), False, 0)


def test_the_longest_prompt_leaves_one_token():
    assert spec([1] * 15).max_tokens == 1


@pytest.mark.parametrize("length", [16, 17, 1000])
def test_a_prompt_of_the_context_length_is_too_long(length):
    error = refused(prompt_ids=[1] * length)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")
    assert error.message.startswith(
        f"This model's maximum context length is 16 tokens. However, your prompt contains {length} tokens"
    )


def test_an_empty_prompt_is_refused():
    assert refused(prompt_ids=[]).param == "prompt"
    for text in ("", 7):
        with pytest.raises(RequestError):
            encode_text(TinyTokenizer(), text)


@pytest.mark.parametrize("token_id", [-1, 100, 2**70, 1.0, True, "1", None])
def test_a_prompt_id_outside_the_vocabulary_is_refused_with_its_position(token_id):
    assert "position 1" in refused(prompt_ids=[0, token_id]).message


def test_max_tokens_is_clipped_to_the_context():
    assert spec(max_tokens=3).max_tokens == 3
    assert spec(max_tokens=MAX_INT32).max_tokens == 14


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        pytest.param("max_tokens", 10**5000, id="max_tokens-5001-digits"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.01),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", False),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 1.0),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 5),
        ("stop", "x" * 257),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop", "\ud800"),
        ("stop_token_ids", [100]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 65),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
        ("priority", 2**31),
        ("priority", 0.5),
    ],
)
def test_a_value_out_of_bounds_is_a_400_that_names_it(param, value):
    error = refused(**{param: value})
    assert (error.status, error.code, error.param) == (400, "invalid_value", param)
    assert f"`{param}`" in error.message
    assert len(error.message) <= MAX_ERROR_CHARS


@pytest.mark.parametrize(
    ("param", "value", "kept"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 2, 2.0),
        ("temperature", 1e-30, 0.0),
        ("temperature", 0.001, 0.001),
        ("top_p", 1e-9, 1e-9),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("top_k", 1, 1),
        ("top_k", 99, 99),
        ("top_k", 100, 0),
        ("min_p", 1, 1.0),
    ],
)
def test_sampling_values_at_the_bounds(param, value, kept):
    assert getattr(spec(**{param: value}).sampling, param) == kept


def test_stop_is_one_string_or_several():
    assert spec(stop="a").stop == ("a",)
    assert spec(stop=["a", "b"]).stop == ("a", "b")


def test_the_seed_of_a_choice_is_splitmix64():
    assert [choice_seed(1234567, choice) for choice in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert choice_seed(0, 0) == 0xE220A8397B1DCDAF
    assert choice_seed(-1, 0) == choice_seed(2**64 - 1, 0)


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 127))
def test_a_choice_seed_has_64_bits(seed, choice):
    assert 0 <= choice_seed(seed, choice) < 2**64


def test_choices_differ_and_repeat():
    assert spec(choice=1).sampling.seed != spec(choice=0).sampling.seed
    assert spec(choice=1) == spec(choice=1)


def test_a_seed_is_kept_or_drawn_small_enough_for_json():
    assert fix_seed(-(2**63)) == -(2**63)
    assert fix_seed(0) == 0
    drawn = {fix_seed(None) for _ in range(100)}
    assert len(drawn) == 100
    assert max(drawn) < 2**DRAWN_SEED_BITS


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.0, True, "1"])
def test_a_seed_out_of_bounds_is_refused(seed):
    with pytest.raises(RequestError, match="`seed`"):
        fix_seed(seed)


def test_messages_become_ids_with_the_assistant_next():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert bytes(encode_messages(TinyTokenizer(), messages)) == b"<system>s\n<user>ab\n<assistant>"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "", "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": "\udfff"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "first"}], "messages"),
    ],
)
def test_messages_that_cannot_be_rendered_name_the_place(messages, param):
    with pytest.raises(RequestError) as error:
        encode_messages(TinyTokenizer(), messages)
    assert (error.value.status, error.value.param) == (400, param)


def test_a_model_without_a_template_says_so():
    tokenizer = TinyTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        encode_messages(tokenizer, [{"role": "user", "content": "hi"}])


def test_a_lone_surrogate_is_found():
    with pytest.raises(RequestError, match="character 2"):
        encode_text(TinyTokenizer(), "ab\ud83d")


def test_error_text_is_bounded():
    assert len(RequestError(400, "invalid_value", "x" * 10_000).message) == MAX_ERROR_CHARS
    assert len(refused(stop={"a": "x" * 10**6}).message) < 200


@pytest.mark.parametrize(
    ("code", "status"), [("queue_full", 429), ("shutting_down", 503), ("not_ready", 503), ("never_fits", 400)]
)
def test_the_engines_refusals_have_a_status(code, status):
    assert refusal(AdmissionError(code, "why")).status == status
