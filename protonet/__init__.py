"""Few-shot classification with prototype networks: a learned embedding, class prototypes in a buffer, cosine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from protonet.errors import DISTRIBUTION, InputError, InputTypeError, MissingPackageError, installed_version

if TYPE_CHECKING:
    from protonet.encoder import Encoder
    from protonet.files.model import Model, load_model, save_model
    from protonet.fit.solver import solve
    from protonet.network import PrototypeNetwork
    from protonet.views.evaluation import plan_encoder

__all__ = [
    "Encoder",
    "InputError",
    "InputTypeError",
    "MissingPackageError",
    "Model",
    "PrototypeNetwork",
    "load_model",
    "plan_encoder",
    "save_model",
    "solve",
]

#: The module of each name that is imported on first use: commands start without torch.
LAZY_EXPORTS = {
    "Encoder": "encoder",
    "Model": "files.model",
    "PrototypeNetwork": "network",
    "load_model": "files.model",
    "plan_encoder": "views.evaluation",
    "save_model": "files.model",
    "solve": "fit.solver",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: a command answers, also to Ctrl-C, before torch is there."""
    if name == "__version__":
        return installed_version(DISTRIBUTION) or "unknown"
    if name not in LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{LAZY_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
