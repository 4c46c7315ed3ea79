"""What /metrics says after known requests."""

from __future__ import annotations

import asyncio

from fake_engine import FakeEngine
from http_harness import Site, running_site


async def scrape(site: Site) -> dict[str, float]:
    response = await site.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_speculation_is_counted_by_position() -> None:
    async with running_site(FakeEngine(tokens_per_step=(3, 1), k=4)) as site:
        await site.complete(max_tokens=8)
        series = await scrape(site)
    assert series["paceline:spec_decode_num_drafts_total"] == 4
    assert series["paceline:spec_decode_num_draft_tokens_total"] == 16
    assert series["paceline:spec_decode_num_accepted_tokens_total"] == 4
    accepted = "paceline:spec_decode_num_accepted_tokens_per_pos_total"
    assert [series[f'{accepted}{{position="{i}"}}'] for i in range(4)] == [2, 2, 0, 0]


async def test_requests_and_tokens_are_counted_by_how_they_ended() -> None:
    async with running_site(FakeEngine(max_running=1, max_waiting=0)) as site:
        site.engine.max_waiting = 5
        await site.complete(max_tokens=8)
        await site.complete(max_tokens=8, n=2, stream=True)
        site.engine.max_waiting = 0
        site.engine.gate.hold()
        asked = asyncio.create_task(site.complete())
        await site.engine.until(lambda engine: len(engine.running) == 1)
        held = await scrape(site)
        assert (await site.complete()).status_code == 429
        asked.cancel()
        await site.engine.idle()
        series = await scrape(site)
    assert held["paceline:num_requests_running"] == 1
    assert series["paceline:num_requests_running"] == 0
    assert series["paceline:num_requests_waiting"] == 0
    assert series['paceline:request_success_total{finished_reason="length"}'] == 3
    assert series['paceline:request_success_total{finished_reason="abort"}'] == 1
    assert series['paceline:request_refused_total{reason="queue_full"}'] == 1
    assert series["paceline:generation_tokens_total"] == 24
    assert series["paceline:prompt_tokens_total"] == 12
    assert series["paceline:time_to_first_token_seconds_count"] == 3
    assert series["paceline:e2e_request_latency_seconds_count"] == 4
    assert series['paceline:http_requests_total{path="/v1/completions",status="200"}'] == 2
    assert series['paceline:http_requests_total{path="/v1/completions",status="429"}'] == 1


async def test_the_page_pool_is_shown_and_strange_paths_make_no_series() -> None:
    async with running_site() as site:
        for index in range(5):
            await site.client.get(f"/{index}")
        series = await scrape(site)
    assert series["paceline:kv_pages"] == 8
    assert series["paceline:kv_pages_free"] == 6
    assert series['paceline:process_resident_memory_bytes{service="target"}'] == 5000
    assert series['paceline:process_resident_memory_bytes{service="gateway"}'] == 300
    assert series["paceline:kv_cache_usage_perc"] == 0.25
    assert series['paceline:http_requests_total{path="other",status="404"}'] == 5
    assert not any("_created" in name for name in series)


async def test_what_the_k_controller_believes_is_shown() -> None:
    async with running_site() as site:
        series = await scrape(site)
    assert series["paceline:spec_decode_k"] == 2
    assert series['paceline:spec_decode_expected_acceptance{position="1"}'] == 0.25
    assert series['paceline:spec_decode_expected_round_seconds{k="2"}'] == 0.014
    assert series['paceline:spec_decode_expected_tokens_per_second{k="0"}'] == 100.0


async def test_busy_and_idle_time_of_the_services_and_of_rounds_are_shown() -> None:
    async with running_site() as site:
        series = await scrape(site)
    assert series["paceline:num_groups"] == 2
    assert series['paceline:service_busy_seconds_total{service="target"}'] == 6.0
    assert series['paceline:service_busy_seconds_total{service="draft"}'] == 2.5
    assert series['paceline:spec_decode_hidden_rounds_total{outcome="rows"}'] == 5
    assert series['paceline:spec_decode_hidden_rounds_total{outcome="no_rows"}'] == 2
    assert series['paceline:service_idle_ratio{service="target"}'] == 0.4
    assert series['paceline:service_idle_ratio{service="draft"}'] == 0.75
    assert series["paceline:round_seconds_total"] == 8.0
