"""Progress bars on stderr, for terminals only: pipes and log files stay free of them."""

from __future__ import annotations

from typing import Any


def progress_bar(*, shown: bool = True, delay: float = 1.0, **settings: Any) -> Any:
    """Create a tqdm progress bar.

    Args:
        shown: Whether to show the bar, if stderr is a terminal.
        delay: Seconds before the bar appears, so that short work shows none.
        **settings: Further arguments of tqdm, such as ``total``, ``unit`` and ``leave``.
    """
    from tqdm import tqdm  # noqa: PLC0415 - slow to import

    # With None, tqdm disables the bar unless its file is a terminal.
    return tqdm(disable=None if shown else True, delay=delay, dynamic_ncols=True, **settings)
