"""The key-value header of a GGUF file (version 2 or 3, little-endian), without its tensors.

The `gguf` package builds arrays for every single element of the header, which takes seconds for a
vocabulary; this reads the same bytes in some tens of milliseconds. Format: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""struct format by value type."""


def read_gguf_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Values of the keys for which wanted(key) holds: int, float, bool, str, or a list of one of these.

    Raises ValueError for a file that is not GGUF or whose header is cut off or damaged.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ValueError(f"{path} is empty, not a GGUF file") from None
    with data:
        if data[:4] != MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it begins with {data[:4]!r}")
        try:
            return GgufHeader(data).read(wanted)
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, ValueError) as error:
            raise ValueError(f"{path} has a damaged GGUF header: {error}") from error


class GgufHeader:
    """Reads through a mapped file. After `read`, tensor_count is set and `at` is where the tensor directory
    begins."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = len(MAGIC)
        self.tensor_count = 0

    def read(self, wanted: Callable[[str], bool]) -> dict[str, Any]:
        version = self.scalar("<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, expected 2 or 3")
        self.tensor_count = self.scalar("<Q")
        values = {}
        for _ in range(self.scalar("<Q")):
            key = self.string()
            value = self.value(self.scalar("<I"))
            if wanted(key):
                values[key] = value
        return values

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError(f"{size} bytes wanted at offset {self.at}, the file has {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        return self.scalar(SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            numbers: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
            return numbers
        if kind != STRING:
            raise ValueError(f"an array of elements of type {kind}")
        if count > len(self.data):
            raise ValueError(f"an array of {count} elements in a file of {len(self.data)} bytes")
        return [self.string() for _ in range(count)]
