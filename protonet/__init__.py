"""Few-shot classification with prototype networks: an embedding, class prototypes in a buffer, cosine similarity."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from protonet.errors import DISTRIBUTION_NAME, InputError, InputTypeError, MissingPackageError, installed_version

if TYPE_CHECKING:
    from protonet.estimator import ProtoNetClassifier as ProtoNetClassifier
    from protonet.files.model import Model, load_model, save_model
    from protonet.fit.solver import solve
    from protonet.network import Encoder, PrototypeNetwork
    from protonet.optimizer import CustomOptimizer as CustomOptimizer

#: Without `ProtoNetClassifier`, which needs scikit-learn, and `CustomOptimizer`, whose base class is slow to import.
__all__ = [
    "Encoder",
    "InputError",
    "InputTypeError",
    "MissingPackageError",
    "Model",
    "PrototypeNetwork",
    "load_model",
    "save_model",
    "solve",
]

#: The module of each public name. Modules are imported on first use, so that commands start without torch.
LAZY_EXPORTS = {
    "CustomOptimizer": "optimizer",
    "Encoder": "network",
    "Model": "files.model",
    "ProtoNetClassifier": "estimator",
    "PrototypeNetwork": "network",
    "load_model": "files.model",
    "save_model": "files.model",
    "solve": "fit.solver",
}


def __getattr__(name: str) -> Any:
    """Import the public name ``name`` on first use.

    Commands thus report errors and react to Ctrl-C before torch is imported.
    """
    if name == "__version__":
        return installed_version(DISTRIBUTION_NAME) or "unknown"
    if name not in LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{LAZY_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY_EXPORTS, "__version__"})
