"""Keys, exposure, request ids, and what the endpoints that generate nothing tell."""

from __future__ import annotations

import socket

import pytest
from fake_engine import FakeEngine
from http_harness import MESSAGES, running_site

from services.gateway.http.server import BindError, listen
from services.gateway.http.settings import ExposedWithoutKey, check_exposure


async def test_everything_is_closed_without_a_key_except_health_and_ready() -> None:
    async with running_site(api_keys=("one", "zwölf")) as site:
        paths = ("/v1/models", "/v1/models/tiny", "/version", "/metrics", "/nothing", "/tokenize", "/health/")
        for path in paths:
            response = await site.client.get(path)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert (await site.chat()).status_code == 401
        for path in ("/health", "/ready"):
            assert (await site.client.get(path)).status_code == 200
        assert not site.engine.specs


async def test_any_key_opens_as_bearer_or_x_api_key() -> None:
    async with running_site(api_keys=("one", "zwölf")) as site:
        good: list[tuple[str, bytes]] = [
            ("Authorization", b"Bearer one"),
            ("authorization", b"bearer  one"),
            ("Authorization", "Bearer zwölf".encode()),
            ("X-Api-Key", b"one"),
        ]
        bad: list[tuple[str, bytes]] = [
            ("Authorization", b"one"),
            ("Authorization", b"Basic one"),
            ("Authorization", b"Bearer"),
            ("Authorization", b"Bearer on"),
            ("Authorization", b"Bearer onee"),
            ("X-Api-Key", b""),
            ("X-Api-Key", b"\xff"),
        ]
        for name, value in good:
            assert (await site.client.get("/version", headers=[(name.encode(), value)])).status_code == 200
        for name, value in bad:
            assert (await site.client.get("/version", headers=[(name.encode(), value)])).status_code == 401


async def test_metrics_can_be_opened() -> None:
    async with running_site(api_keys=("one",), open_metrics=True) as site:
        assert (await site.client.get("/metrics")).status_code == 200
        assert (await site.client.get("/version")).status_code == 401


def test_a_host_beyond_loopback_needs_a_key() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"):
        check_exposure(host, ())
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(ExposedWithoutKey, match="--api-key"):
            check_exposure(host, ())
        check_exposure(host, ("key",))


def test_what_is_written_is_sent_at_once() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_that_cannot_be_had_is_one_line_with_a_remedy() -> None:
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    cases = {
        ("127.0.0.1", port): "another --port",
        ("192.0.2.1", 0): "--host",
        ("no.such.host.invalid", 0): "--host",
        ("127.0.0.1", 70_000): "--port",
    }
    try:
        for (host, wanted), remedy in cases.items():
            with pytest.raises(BindError, match=remedy) as error:
                listen(host, wanted)
            assert "\n" not in str(error.value)
            assert host in str(error.value)
    finally:
        taken.close()


async def test_a_request_id_is_echoed_or_made() -> None:
    async with running_site(api_keys=("k",)) as site:
        mine = {"X-Request-Id": "abc-123", "X-Api-Key": "k"}
        for path in ("/version", "/nothing", "/v1/completions"):
            response = await site.client.get(path, headers=mine)
            assert response.headers["x-request-id"] == "abc-123"
        strange = [b"", b"a b", b"x" * 129, b"\xe4"]
        made = [(await site.client.get("/version", headers={b"X-Request-Id": one})) for one in strange]
        ids = {response.headers["x-request-id"] for response in made}
        assert len(ids) == len(strange)
        assert all(len(one) == 32 for one in ids)
        assert all(response.status_code == 401 for response in made)
        body = {"prompt": "hi", "max_tokens": 3, "stream": True}
        for _ in range(3):
            answer = await site.client.post("/v1/completions", json=body, headers=mine)
            assert answer.headers["x-request-id"] == "abc-123"
            assert answer.text.endswith("data: [DONE]\n\n")


async def test_the_served_model_is_listed_and_retrieved() -> None:
    card = {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "paceline",
        "max_model_len": 256,
    }
    async with running_site() as site:
        assert (await site.client.get("/v1/models")).json() == {"object": "list", "data": [card]}
        assert (await site.client.get("/v1/models/tiny")).json() == card
        missing = await site.client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_tokenize_and_detokenize_are_inverse() -> None:
    text = "grün 🙂\n"
    async with running_site() as site:
        answer = (await site.client.post("/tokenize", json={"prompt": text})).json()
        bare = (
            await site.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
        ).json()
        chat = (await site.client.post("/tokenize", json={"messages": MESSAGES})).json()
        back = (await site.client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
        empty = (await site.client.post("/tokenize", json={"prompt": ""})).json()
    assert answer == {
        "count": len(text.encode()) + 1,
        "max_model_len": 256,
        "tokens": [256, *text.encode()],
        "token_strs": None,
    }
    assert bare["tokens"] == list(text.encode())
    assert bytes(chat["tokens"]) == b"<user>hi\n<assistant>"
    assert back == {"prompt": text}
    assert empty["tokens"] == []


async def test_tokenize_and_detokenize_refuse_by_name() -> None:
    async with running_site() as site:
        cases = [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
            ("/tokenize", {"prompt": ["a"]}, "prompt"),
            ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [258]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": [10**400]}, "tokens"),
            ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ]
        for path, body, param in cases:
            response = await site.client.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


async def test_ready_needs_the_target_and_health_does_not() -> None:
    engine = FakeEngine()
    async with running_site(engine) as site:
        engine.draft_ready = False
        assert (await site.client.get("/ready")).json() == {"status": "ready", "draft": False}
        engine.ready = False
        ready = await site.client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "starting")
        assert (await site.client.get("/health")).status_code == 200
        assert (await site.client.get("/version")).json() == {"version": "1.2.3"}
