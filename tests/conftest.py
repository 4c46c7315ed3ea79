"""Fixtures shared by every kind of test."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF, downloaded once into the cache and checked."""
    from common.model.catalog import resolve_model

    return resolve_model("smollm2-135m-instruct").path
