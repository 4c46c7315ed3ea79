"""The HTTP front with the demo model's vocabulary and chat template."""

from __future__ import annotations

from pathlib import Path

import httpx
from fake_engine import FakeEngine

from common.model.tokenizer import load_tokenizer
from services.gateway.http.app import create_app
from services.gateway.http.server import serve_http
from services.gateway.http.settings import HttpSettings


async def test_messages_become_the_ids_that_the_demo_model_was_trained_on(demo_gguf: Path) -> None:
    tokenizer = load_tokenizer(demo_gguf)
    engine = FakeEngine(max_model_len=2048, vocab_size=tokenizer.vocab_size)
    server = await serve_http(create_app(engine, tokenizer, HttpSettings(version="1")), "127.0.0.1", 0)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 世界 🙂"}]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            tokens = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
            text = (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
            plain = (await client.post("/tokenize", json={"prompt": "Grüße, 世界 🙂"})).json()["tokens"]
            back = (await client.post("/detokenize", json={"tokens": plain})).json()["prompt"]
    finally:
        await server.shutdown(0)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nGrüße, 世界 🙂<|im_end|>\n<|im_start|>assistant\n"
    )
    assert back == "Grüße, 世界 🙂"
