"""The submission: ``Solution.solve`` hands the contest's loaders to protonet.

The contest loads this file by its path, and the workspace is not on ``sys.path``. The library is the folder
``protonet`` beside this file (as packed) or beside this file's folder (in the repository), never an
installed one.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn


def _load_library() -> ModuleType:
    """Import the protonet beside this file; ``sys.path`` is neither used nor changed."""
    here = Path(__file__).resolve().parent
    candidates = [folder / "protonet" / "__init__.py" for folder in (here, here.parent)]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise ModuleNotFoundError(f"solution: `protonet` must lie in {here} or beside it. Pack it again.")
    loaded = sys.modules.get("protonet")
    if loaded is not None and loaded.__file__ and Path(loaded.__file__).resolve() == path:
        return loaded
    for name in [name for name in sys.modules if name.partition(".")[0] == "protonet"]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location("protonet", path)
    assert spec is not None
    assert spec.loader is not None
    library = sys.modules["protonet"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    return library


_library = _load_library()

#: The entries of the contest's metadata that `protonet.solve` uses.
USED_METADATA_KEYS = ("num_classes", "input_dim", "param_limit", "device")


class Solution:
    """The entry point that the contest calls."""

    def solve(self, train_loader: Any, val_loader: Any, metadata: dict[str, Any] | None = None) -> nn.Module:
        """Train a `protonet.PrototypeNetwork`; see `protonet.solve`."""
        known = None if metadata is None else {name: metadata[name] for name in USED_METADATA_KEYS if name in metadata}
        network: nn.Module = _library.solve(train_loader, val_loader, known)
        return network
