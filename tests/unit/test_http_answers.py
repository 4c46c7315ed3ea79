"""What the generating endpoints answer when all is well."""

from __future__ import annotations

import itertools

from fake_engine import FakeEngine
from http_harness import events, running_site
from tiny_tokenizer import TinyTokenizer

from services.gateway.admission import choice_seed
from services.gateway.http.schemas import CHAT_UNBUILT, COMPLETION_UNBUILT, GenerationRequest

POEM = 'Hello, wörld 🙂 — und 漢字\n\ttabs "quotes" \\ and the end'


def scripted() -> FakeEngine:
    return FakeEngine(script=lambda prompt: POEM, cached_tokens=3)


async def test_a_chat_completion_has_openai_s_shape() -> None:
    async with running_site(scripted()) as site:
        answer = (await site.chat(seed=7)).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    prompt_tokens = len(b"<user>hi\n<assistant>")
    completion_tokens = len(POEM.encode()) + 1
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": POEM, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
        "seed": 7,
    }


async def test_a_text_completion_has_openai_s_shape() -> None:
    async with running_site(scripted()) as site:
        answer = (await site.complete(stop=" und", seed=-1)).json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["seed"] == -1
    assert answer["choices"] == [
        {
            "index": 0,
            "text": POEM.partition(" und")[0],
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": " und",
        }
    ]


async def test_streamed_text_is_the_text_that_is_not_streamed() -> None:
    cases = itertools.product([(1,), (2, 3), (7,), (100,)], [None, ["漢"], ['tabs "q', "zzz"]])
    async with running_site(scripted()) as site:
        for steps, stop in cases:
            site.engine.tokens_per_step = steps
            whole = (await site.complete(stop=stop)).json()["choices"][0]
            streamed = events((await site.complete(stop=stop, stream=True)).text)
            text = "".join(event["choices"][0]["text"] for event in streamed[:-1])
            assert text == whole["text"] == (POEM if stop is None else POEM.partition(stop[0])[0])
            assert streamed[-2]["choices"][0]["finish_reason"] == whole["finish_reason"]
            assert streamed[-1] == "[DONE]"


async def test_streamed_usage_is_the_usage_that_is_not_streamed() -> None:
    async with running_site(scripted()) as site:
        whole = (await site.chat(n=2)).json()
        streamed = events((await site.chat(n=2, stream=True, stream_options={"include_usage": True})).text)
    assert streamed[-2]["usage"] == whole["usage"]
    assert streamed[-2]["choices"] == []
    assert whole["usage"]["completion_tokens"] == 2 * (len(POEM.encode()) + 1)


async def test_a_prompt_may_be_a_text_ids_or_a_list_of_either() -> None:
    tokenizer = TinyTokenizer()
    hi, ho = (tokenizer.encode(text, add_special=True) for text in ("hi", "ho"))
    cases: list[tuple[object, list[list[int]]]] = [
        ("hi", [hi]),
        (["hi", "ho"], [hi, ho]),
        (hi, [hi]),
        ([hi, ho], [hi, ho]),
        (["hi"], [hi]),
    ]
    async with running_site() as site:
        for prompt, ids in cases:
            site.engine.specs.clear()
            answer = (await site.complete(prompt=prompt, max_tokens=4)).json()
            assert [list(spec.prompt_ids) for spec in site.engine.specs] == ids
            assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))
            assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_choices_are_numbered_over_prompts_and_each_has_its_own_seed() -> None:
    async with running_site() as site:
        body = {"prompt": ["a", "b"], "n": 2, "seed": 5, "max_tokens": 12}
        whole = (await site.complete(**body)).json()
        streamed = events((await site.complete(**body, stream=True)).text)
    seeds = [spec.sampling.seed for spec in site.engine.specs]
    assert seeds[:4] == [choice_seed(5, index) for index in range(4)]
    texts = dict.fromkeys(range(4), "")
    ends: list[int] = []
    for event in streamed[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert sorted(ends) == [0, 1, 2, 3]
    assert list(texts.values()) == [choice["text"] for choice in whole["choices"]]
    assert len(set(texts.values())) == 4
    assert whole["usage"]["prompt_tokens"] == 4  # BOS and one byte, twice: a prompt counts once


async def test_a_drawn_seed_is_reported_and_repeats_the_text() -> None:
    async with running_site() as site:
        first = (await site.complete(max_tokens=20)).json()
        again = (await site.complete(max_tokens=20, seed=first["seed"])).json()
        other = (await site.complete(max_tokens=20)).json()
        streamed = events((await site.complete(max_tokens=20, stream=True)).text)
    assert again["choices"] == first["choices"]
    assert other["choices"] != first["choices"]
    assert isinstance(streamed[-2]["seed"], int)


async def test_sampling_parameters_reach_the_engine() -> None:
    async with running_site() as site:
        await site.complete(
            temperature=0.7, top_p=0.9, top_k=5, min_p=0.05, stop_token_ids=[1], ignore_eos=True, priority=-3,
            max_tokens=9,
        )  # fmt: skip
        await site.chat(max_tokens=9, max_completion_tokens=4)
        await site.chat()
        await site.complete(temperature=0)
    given, both, default, greedy = site.engine.specs
    assert (given.sampling.temperature, given.sampling.top_p) == (0.7, 0.9)
    assert (given.sampling.top_k, given.sampling.min_p) == (5, 0.05)
    assert (given.stop_token_ids, given.ignore_eos, given.priority) == ((1,), True, -3)
    assert given.max_tokens == 9
    assert both.max_tokens == 4
    assert default.sampling.temperature == 1.0
    assert default.max_tokens == 256 - len(default.prompt_ids)
    assert greedy.sampling.temperature == 0.0


async def test_null_means_absent_for_every_optional_field() -> None:
    engine = FakeEngine(tokens_per_step=(300,))
    shared = {*GenerationRequest.__struct_fields__, "user"}
    text = {*shared, *COMPLETION_UNBUILT}
    chat = {*shared, *CHAT_UNBUILT, "max_completion_tokens"}
    async with running_site(engine) as site:
        for name in text:
            assert (await site.complete(**{name: None})).status_code == 200, name
        for name in chat:
            assert (await site.chat(**{name: None})).status_code == 200, name


async def test_fields_that_change_nothing_and_unknown_fields_are_accepted() -> None:
    async with running_site() as site:
        harmless = {
            "model": "tiny",
            "logprobs": False,
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "user": "someone",
            "metadata": {"a": "b"},
            "an_unknown_field": [1, {"x": None}],
        }
        assert (await site.chat(**harmless)).status_code == 200
        assert (await site.complete(best_of=1, suffix="", echo=False)).status_code == 200


async def test_message_content_may_be_text_parts_and_developer_is_system() -> None:
    async with running_site() as site:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
        assert (await site.chat(messages=messages)).status_code == 200
    rendered = bytes(site.engine.specs[0].prompt_ids).decode()
    assert rendered == "<system>be brief\n<user>ab\n<assistant>"


async def test_token_ids_and_draft_counts_come_when_asked_for() -> None:
    engine = FakeEngine(tokens_per_step=(3,), k=4)
    async with running_site(engine) as site:
        body = {"max_tokens": 6, "return_token_ids": True, "paceline_spec": True}
        whole = (await site.complete(**body)).json()["choices"][0]
        streamed = events((await site.complete(**body, stream=True, seed=1)).text)
        plain = (await site.complete(max_tokens=6)).json()["choices"][0]
    assert bytes(whole["token_ids"]).decode() == whole["text"]
    assert whole["spec"] == {"drafted": 8, "accepted": 4, "from_draft": [True, True, False] * 2}
    pieces = [event["choices"][0] for event in streamed[:-2]]
    assert sum(piece["spec"]["drafted"] for piece in pieces) == 8
    for piece in pieces:
        assert bytes(piece["token_ids"]).decode() == piece["text"]
    assert "token_ids" not in plain
    assert "spec" not in plain


async def test_metrics_of_one_choice_have_vllm_s_shape_and_are_null_for_several() -> None:
    engine = FakeEngine(tokens_per_step=(3,), k=4)
    async with running_site(engine) as site:
        whole = (await site.complete(max_tokens=6, paceline_metrics=True)).json()
        several = (await site.complete(max_tokens=6, paceline_metrics=True, n=2)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with_usage = events((await site.complete(max_tokens=6, paceline_metrics=True, **options)).text)
        without = events((await site.complete(max_tokens=6, paceline_metrics=True, stream=True)).text)
    speculation = whole["metrics"]["speculative_decoding"]
    assert speculation == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [0, 0, 2, 0, 0],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 8,
        "num_spec_tokens": 4,
    }
    assert whole["metrics"]["time_to_first_token_ms"] >= 0
    assert several["metrics"] is None
    assert with_usage[-2]["metrics"]["speculative_decoding"] == speculation
    assert without[-2]["metrics"]["speculative_decoding"] == speculation


async def test_a_long_prompt_is_tokenized_off_the_event_loop_and_answered() -> None:
    async with running_site(FakeEngine(max_model_len=100_000)) as site:
        answer = (await site.complete(prompt="word " * 10_000, max_tokens=2)).json()
    assert answer["usage"]["prompt_tokens"] == 50_001
