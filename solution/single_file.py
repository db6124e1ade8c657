"""The submission in a single file, made by ``python -m solution.pack`` from the sources of protonet (MIT).

``LIBRARY_FILES`` holds the library protonet, file by file as it is in the repository; the code below imports
the library from there. The class ``Solution`` at the end is what the contest calls.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from torch import nn

LIBRARY_FILES: dict[str, str] = {}


class _EmbeddedLibraryFinder(MetaPathFinder, ExecutionLoader):
    """Import finder and loader of the modules in ``LIBRARY_FILES``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if self._path_of(fullname) in LIBRARY_FILES else None

    def is_package(self, fullname: str) -> bool:
        return self._path_of(fullname).endswith("__init__.py")

    def get_source(self, fullname: str) -> str:
        return LIBRARY_FILES[self._path_of(fullname)]

    def get_filename(self, fullname: str) -> str:
        return f"{__file__}/{self._path_of(fullname)}"

    @staticmethod
    def _path_of(fullname: str) -> str:
        """Return the path of a module in ``LIBRARY_FILES``, given its full name."""
        path = fullname.replace(".", "/")
        package = f"{path}/__init__.py"
        return package if package in LIBRARY_FILES else f"{path}.py"


def _load_library() -> ModuleType:
    """Import protonet from ``LIBRARY_FILES``; ``sys.path`` and ``sys.meta_path`` are restored."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "protonet"]:
        del sys.modules[name]
    finder = _EmbeddedLibraryFinder()
    sys.meta_path.insert(0, finder)
    try:
        for path in LIBRARY_FILES:
            __import__(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    finally:
        sys.meta_path.remove(finder)
    return sys.modules["protonet"]


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
