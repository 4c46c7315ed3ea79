"""Fixtures shared by every kind of test."""

import signal
from pathlib import Path

import pytest

# A shell's background jobs have SIGINT ignored, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF, downloaded once into the cache and checked."""
    from common.model.catalog import resolve_model

    return resolve_model("smollm2-135m-instruct").path
