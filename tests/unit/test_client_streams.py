"""The clients against a real front on a fake engine."""

import asyncio
import gc
import os
import signal
import threading

import pytest
from fake_engine import FakeEngine
from zmq_harness import ByteTokenizer, Server, ipc_address, serving

import paceline
from paceline import (
    AsyncClient,
    Client,
    ConnectionLost,
    InvalidRequest,
    Overloaded,
    PacelineError,
    RequestTimeout,
    ServerError,
    Unavailable,
)
from services.gateway.zmq.front import ZmqFront
from services.gateway.zmq.settings import ZmqSettings

TEXT = "naïve 🚴 riders take turns"


def scripted(**options: object) -> FakeEngine:
    return FakeEngine(script=lambda _: TEXT, **options)


async def test_a_prompt_streams_to_its_final():
    async with serving(scripted()) as stack, AsyncClient(stack.address) as client:
        stream = client.generate("ride", seed=7)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert bytes(i for chunk in chunks for i in chunk.token_ids if i < 256).decode() == TEXT
    assert stream.final.finish_reason == "stop"
    assert stream.final.seed == 7
    assert stream.final.usage.prompt == len("ride") + 1
    assert stream.final.usage.completion == sum(len(chunk.token_ids) for chunk in chunks)
    assert stream.final.spec.accepted == sum(chunk.accepted for chunk in chunks) > 0
    assert stream.final.spec.steps == sum(chunk.steps for chunk in chunks)


async def test_spans_cover_the_text_and_mark_what_the_draft_gave():
    engine = FakeEngine(tokens_per_step=(3,), script=lambda _: "abcdef")
    async with serving(engine) as stack, AsyncClient(stack.address) as client:
        chunks = [chunk async for chunk in client.generate("ride")]
    assert [(chunk.text, chunk.spans) for chunk in chunks] == [
        ("abc", [0, 2, 1]),
        ("def", [0, 2, 1]),
        ("", []),
    ]


async def test_the_three_prompt_forms_reach_the_engine_as_ids():
    async with serving(scripted()) as stack, AsyncClient(stack.address) as client:
        await client.generate("hi").result()
        await client.generate(token_ids=[104, 105]).result()
        await client.generate(messages=[{"role": "user", "content": "hi"}]).result()
    prompts = [spec.prompt_ids for spec in stack.engine.specs]
    assert prompts == [(256, 104, 105), (104, 105), tuple(b"<user>hi\n<assistant>")]


async def test_parameters_reach_the_engine():
    async with serving(scripted()) as stack, AsyncClient(stack.address) as client:
        await client.generate(
            "hi",
            max_tokens=9,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            stop="turns",
            stop_token_ids=[10],
            ignore_eos=True,
            priority=-3,
        ).result()
    (spec,) = stack.engine.specs
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (spec.max_tokens, spec.stop, spec.stop_token_ids) == (9, ("turns",), (10,))
    assert (spec.ignore_eos, spec.priority) == (True, -3)


async def test_many_streams_share_a_connection():
    async with serving() as stack, AsyncClient(stack.address) as client:
        streams = [client.generate(f"rider {n}", max_tokens=40, seed=n) for n in range(20)]
        results = await asyncio.gather(*(stream.result() for stream in streams))
        again = await client.generate("rider 3", max_tokens=40, seed=3).result()
        await stack.engine.idle()
    assert results[3].token_ids == again.token_ids
    assert len({result.token_ids for result in results}) == 20


async def test_leaving_the_loop_cancels_the_generation():
    async with serving() as stack, AsyncClient(stack.address) as client:
        stack.engine.gate.hold()
        stack.engine.gate.allow(1)
        async for _ in client.generate("ride"):
            break
        await stack.engine.idle()


async def test_a_dropped_stream_cancels_the_generation():
    async with serving() as stack, AsyncClient(stack.address) as client:
        stack.engine.gate.hold()
        stack.engine.gate.allow(1)
        stream = client.generate("ride")
        await anext(stream)
        del stream
        gc.collect()
        await stack.engine.idle()


async def test_a_cancelled_reader_cancels_the_generation():
    async with serving() as stack, AsyncClient(stack.address) as client:
        stack.engine.gate.hold()
        stack.engine.gate.allow(1)
        stream = client.generate("ride")
        await anext(stream)
        reader = asyncio.ensure_future(stream.result())
        await asyncio.sleep(0)
        reader.cancel()
        await stack.engine.idle()
        with pytest.raises(PacelineError, match="closed"):
            await anext(stream)


async def test_cancel_ends_the_stream_with_abort():
    async with serving() as stack, AsyncClient(stack.address) as client:
        stack.engine.gate.hold()
        stack.engine.gate.allow(1)
        stream = client.generate("ride")
        await anext(stream)
        stream.cancel()
        stream.cancel()
        assert [chunk async for chunk in stream] == []
        assert stream.final.finish_reason == "abort"


async def test_a_request_cancelled_before_there_is_a_server_ends_with_abort():
    with ipc_address() as address:
        async with AsyncClient(address) as client:
            stream = client.generate("ride")
            stream.cancel()
            assert [chunk async for chunk in stream] == []
            assert stream.final.finish_reason == "abort"


async def test_final_is_refused_before_the_end():
    async with serving() as stack, AsyncClient(stack.address) as client:
        stream = client.generate("ride")
        with pytest.raises(PacelineError, match="has not ended"):
            _ = stream.final


@pytest.mark.parametrize(
    ("params", "code", "param"),
    [
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"token_ids": []}, "invalid_value", "token_ids"),
        ({"token_ids": [1, 258]}, "invalid_value", "token_ids"),
        ({"token_ids": [1] * 256}, "context_length_exceeded", "token_ids"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "me first"}]}, "invalid_value", "messages"),
        ({"prompt": "x", "temperature": float("nan")}, "invalid_value", "temperature"),
        ({"prompt": "x", "max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"prompt": "x", "seed": -(2**63) + 0, "top_p": 0.0}, "invalid_value", "top_p"),
    ],
)
async def test_what_the_server_refuses_names_the_field(params, code, param):
    async with serving() as stack, AsyncClient(stack.address) as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.generate(**params).result()
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"prompt": "x", "token_ids": [1]},
        {"prompt": "x", "temperature": "hot"},
        {"prompt": "x", "max_tokens": 2**70},
        {"prompt": "lone \ud800"},
        {"token_ids": [0.5]},
        {"prompt": "x", "stop": [3]},
    ],
)
async def test_what_cannot_be_sent_is_refused_at_the_call(params):
    with ipc_address() as address:
        async with AsyncClient(address) as client:
            with pytest.raises(InvalidRequest):
                client.generate(**params)


async def test_a_full_queue_is_overloaded():
    async with serving(FakeEngine(max_running=1, max_waiting=0)) as stack:
        stack.engine.gate.hold()
        stack.engine.gate.allow(1)
        async with AsyncClient(stack.address) as client:
            first = client.generate("ride")
            await anext(first)
            with pytest.raises(Overloaded):
                await client.generate("ride").result()


async def test_an_engine_that_is_not_ready_is_unavailable():
    async with serving() as stack, AsyncClient(stack.address) as client:
        stack.engine.ready = False
        with pytest.raises(Unavailable):
            await client.generate("ride").result()


@pytest.mark.parametrize("failure", ["the target is gone", RuntimeError("broken")])
async def test_a_failing_engine_is_a_server_error_after_the_text_so_far(failure):
    engine = FakeEngine(script=lambda _: TEXT, fail_after=4, failure=failure, tokens_per_step=(2,))
    async with serving(engine) as stack, AsyncClient(stack.address) as client:
        stream = client.generate("ride")
        chunks = [await anext(stream), await anext(stream)]
        with pytest.raises(ServerError):
            await stream.result()
    assert "".join(chunk.text for chunk in chunks) == TEXT[:3]


async def test_no_server_times_out_and_says_what_to_check():
    with ipc_address() as address:
        async with AsyncClient(address, timeout_s=0.05) as client:
            with pytest.raises(RequestTimeout, match=r"no answer from ipc://.*make serve"):
                await client.generate("ride").result()
            with pytest.raises(RequestTimeout, match="make serve"):
                await client.model()


async def test_a_generation_that_takes_too_long_times_out_and_is_cancelled():
    async with serving() as stack, AsyncClient(stack.address) as client:
        stack.engine.gate.hold()
        stream = client.generate("ride", timeout_s=0.2)
        with pytest.raises(RequestTimeout, match="did not end within"):
            await stream.result()
        await stack.engine.idle()


async def test_a_server_that_shuts_down_ends_its_streams():
    async with serving() as stack, AsyncClient(stack.address) as client:
        stack.engine.gate.hold()
        stack.engine.gate.allow(1)
        stream = client.generate("ride")
        await anext(stream)
        await stack.front.close()
        with pytest.raises(Unavailable):
            await stream.result()
        await stack.engine.idle()


async def test_a_client_finds_a_server_that_starts_later():
    with ipc_address() as address:
        async with AsyncClient(address) as client:
            stream = client.generate("ride")
            await asyncio.sleep(0)
            front = ZmqFront(scripted(), ByteTokenizer(), address)
            await front.start()
            assert (await stream.result()).text == TEXT
            await front.close()


async def test_another_server_epoch_fails_what_was_sent_and_the_next_request_works():
    settings = ZmqSettings(heartbeat_s=0.1)
    async with serving(scripted(), settings) as stack, AsyncClient(stack.address) as client:
        stack.engine.gate.hold()
        stack.engine.gate.allow(1)
        stream = client.generate("ride")
        await anext(stream)
        stack.front.epoch += 1
        with pytest.raises(ConnectionLost, match="restarted"):
            await stream.result()
        stack.engine.gate.open()
        assert (await client.generate("ride").result()).text == TEXT


async def test_close_is_idempotent_and_fails_what_runs():
    async with serving() as stack:
        stack.engine.gate.hold()
        client = AsyncClient(stack.address)
        stream = client.generate("ride")
        reader = asyncio.ensure_future(stream.result())
        await client.model()
        await client.close()
        await client.close()
        with pytest.raises(PacelineError, match="closed"):
            await reader
        with pytest.raises(PacelineError, match="closed"):
            client.generate("ride")
        await stack.engine.idle()


def test_a_client_refuses_an_address_that_is_none():
    with pytest.raises(PacelineError, match="tcp://HOST:PORT"):
        AsyncClient("localhost:8001")


def test_the_blocking_client_streams_to_its_final():
    with Server(script=lambda _: TEXT) as server, Client(server.address) as client:
        stream = client.generate("ride")
        assert "".join(chunk.text for chunk in stream) == TEXT
        assert stream.final.finish_reason == "stop"
        assert client.generate("ride").result().text == TEXT
        assert client.model().name == "tiny"


def test_a_dropped_blocking_stream_cancels_the_generation():
    with Server() as server, Client(server.address) as client:
        server.hold_after(1)
        for _ in client.generate("ride"):
            break
        gc.collect()
        server.wait_idle()


def test_a_stream_keeps_its_client_alive():
    with Server(script=lambda _: TEXT) as server:
        stream = Client(server.address).generate("ride")
        gc.collect()
        assert stream.result().text == TEXT


def test_an_interrupted_blocking_reader_cancels_the_generation():
    with Server() as server, Client(server.address) as client:
        server.hold_after(1)
        stream = client.generate("ride")
        next(stream)
        interrupt = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        server.wait_idle()


def test_a_blocking_client_that_is_dropped_ends_its_thread():
    before = threading.active_count()
    client = Client("tcp://127.0.0.1:9")
    assert threading.active_count() == before + 1
    del client
    gc.collect()
    assert threading.active_count() == before


def test_a_closed_blocking_client_says_so():
    client = Client("tcp://127.0.0.1:9")
    client.close()
    client.close()
    with pytest.raises(PacelineError, match="closed"):
        client.generate("ride")


def test_a_fork_may_not_use_its_parents_client(monkeypatch):
    client = Client("tcp://127.0.0.1:9")
    pid = os.getpid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(PacelineError, match="one per process"):
            client.generate("ride")
    client.close()


def test_every_public_name_can_be_imported():
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    with pytest.raises(AttributeError):
        _ = paceline.nothing
