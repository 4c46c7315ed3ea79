"""OpenAI's own client parses, streams, and raises what it should."""

from __future__ import annotations

import asyncio

import openai
import pytest
from fake_engine import FakeEngine
from http_harness import MESSAGES, running_site

TEXT = "All is well 🙂"


def use_the_sync_client(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=1)
        assert whole.choices[0].message.content == TEXT
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        streamed = client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(streamed)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
        assert chunks[-1].usage == whole.usage
        text = client.completions.create(model="tiny", prompt=["a", "b"], n=2)
        assert [choice.text for choice in text.choices] == [TEXT] * 4
        pieces = list(client.completions.create(model="tiny", prompt="a", stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == TEXT
        assert client.models.list().data[0].id == "tiny"
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="tiny", prompt="x" * 300)
        assert long.value.code == "context_length_exceeded"
        assert long.value.param == "prompt"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.models.list()
        assert refused.value.code == "invalid_api_key"
        assert refused.value.request_id


async def test_the_sync_client_works() -> None:
    async with running_site(FakeEngine(script=lambda prompt: TEXT), api_keys=("k",)) as site:
        await asyncio.to_thread(use_the_sync_client, site.url)


async def test_the_async_client_streams_cancels_and_sees_failures() -> None:
    engine = FakeEngine(script=lambda prompt: TEXT)
    async with (
        running_site(engine) as site,
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as client,
    ):
        async with client.chat.completions.stream(model="tiny", messages=MESSAGES) as helper:
            final = await helper.get_final_completion()
        assert final.choices[0].message.content == TEXT
        engine.gate.hold()
        engine.gate.allow(1)
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        await anext(stream)
        await stream.close()
        await engine.idle()
        engine.gate.open()
        engine.fail_after = 4
        with pytest.raises(openai.APIError, match="the target is gone"):
            async for _ in await client.completions.create(model="tiny", prompt="a", stream=True):
                pass
        with pytest.raises(openai.InternalServerError, match="the target is gone"):
            await client.completions.create(model="tiny", prompt="a")
