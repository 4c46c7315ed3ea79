"""A numeric plan that changed between two starts is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.model.plan import NumericPlan
from common.model.plan_cache import changes_since_last_start, plan_file

PLAN = NumericPlan("int4-packed", "decoder-1", "2.13.0", "AVX512", "abc")


def test_the_same_plan_is_no_change(tmp_path: Path) -> None:
    file = tmp_path / "plans" / "demo.json"
    assert changes_since_last_start(file, PLAN) == []
    assert changes_since_last_start(file, PLAN) == []


def test_what_changed_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    changes_since_last_start(file, PLAN)
    other = replace(PLAN, layers="decoder-2", cpu="AVX2")
    assert changes_since_last_start(file, other) == ["layers: decoder-1 → decoder-2", "cpu: AVX512 → AVX2"]
    assert changes_since_last_start(file, other) == []


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    file.write_bytes(b"{")
    assert changes_since_last_start(file, PLAN) == []
    assert changes_since_last_start(file, replace(PLAN, cpu="x")) == ["cpu: AVX512 → x"]


def test_models_and_formats_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    files = {plan_file(model, weights) for model in ("a/b.gguf", "a-b") for weights in ("bf16", "int4")}
    assert len(files) == 4
    assert {file.parent for file in files} == {tmp_path / "plans"}
