from __future__ import annotations

from importlib import import_module

import pytest

from protonet import episodes


def test_exports_are_the_names_of_their_modules() -> None:
    for name in episodes.__all__:
        own = getattr(episodes, name)
        assert getattr(import_module(own.__module__), name) is own
    assert set(episodes.__all__) <= set(dir(episodes))


def test_nothing_else_is_exported() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = episodes.absent
