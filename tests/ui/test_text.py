"""Text output: sizes."""

from __future__ import annotations

import pytest

from protonet.ui.text import format_size


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 kB"), (35_400, "35 kB"), (999_499, "999 kB"), (1_000_000, "1.0 MB"), (12_340_000, "12.3 MB")],
)
def test_sizes_are_in_kilobytes_below_a_megabyte(size: int, text: str) -> None:
    assert format_size(size) == text
