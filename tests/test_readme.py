"""The README's examples run, and what it promises of them holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_python_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    first, estimator, second, optimizer = blocks
    names: dict[str, Any] = {}
    exec(first, names)
    network, features, labels = names["network"], names["features"], names["labels"]
    assert network(features).argmax(dim=1).tolist() == labels.tolist()
    assert network.count_parameters() == sum(p.numel() for p in network.encoder.parameters())
    told: dict[str, Any] = {}
    exec(estimator, told)
    assert told["model"].classes_.tolist() == ["barbera", "barolo", "grignolino", "unheard of"]
    assert told["scores"].mean() > 0.9
    exec(second, names)
    scores = names["scores"]
    assert list(scores) == ["protonet", "adaptive"]
    assert 0.5 < float(scores["adaptive"].accuracy.mean()) < 1
    exec(optimizer, names)
    assert names["optimizer"].skipped == 0


def test_every_module_of_the_library_is_in_the_picture_of_the_house() -> None:
    text = README.read_text(encoding="utf-8")
    for path in (README.parent / "protonet").glob("*.py"):
        assert path.name == "__init__.py" or f"  {path.name} " in text, path.name
    for path in (README.parent / "protonet" / "episodes").glob("*.py"):
        assert path.name == "__init__.py" or path.name in text, path.name
