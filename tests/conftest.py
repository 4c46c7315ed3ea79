"""Fixtures shared by every kind of test."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF, downloaded once into the cache and checked."""
    from common.model.catalog import resolve_model

    return resolve_model("smollm2-135m-instruct").path
