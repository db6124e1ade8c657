"""Few-shot experiments: episodes, methods, evaluation and meta-training.

Rooms, from below: `arguments` are those of the commands beside the evaluation; `draws` numbers the episodes of each
protocol and gathers their rows; `networks` embeds rows; `methods` classify, with settings of their own; `features` come
from data sets and networks; `evaluation` goes from settings to numbers, and `paper` from these to what a paper needs;
`training` meta-trains an encoder.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protonet.episodes.draws.batch import Episodes
    from protonet.episodes.draws.fixed_split import FixedSplit
    from protonet.episodes.draws.numbered import Setting
    from protonet.episodes.evaluation.dataset import evaluate_dataset
    from protonet.episodes.evaluation.evaluate import evaluate
    from protonet.episodes.evaluation.report import format_evaluation, format_report, summarize
    from protonet.episodes.evaluation.statistics import Evaluation
    from protonet.episodes.features.sources import load_source
    from protonet.episodes.methods.choice import choose_methods
    from protonet.episodes.methods.keywords import Tried
    from protonet.sampling import index_classes

__all__ = [
    "Episodes",
    "Evaluation",
    "FixedSplit",
    "Setting",
    "Tried",
    "choose_methods",
    "evaluate",
    "evaluate_dataset",
    "format_evaluation",
    "format_report",
    "index_classes",
    "load_source",
    "summarize",
]

_ROOMS = {
    "Episodes": "episodes.draws.batch",
    "Evaluation": "episodes.evaluation.statistics",
    "FixedSplit": "episodes.draws.fixed_split",
    "Setting": "episodes.draws.numbered",
    "Tried": "episodes.methods.keywords",
    "choose_methods": "episodes.methods.choice",
    "evaluate": "episodes.evaluation.evaluate",
    "evaluate_dataset": "episodes.evaluation.dataset",
    "format_evaluation": "episodes.evaluation.report",
    "format_report": "episodes.evaluation.report",
    "index_classes": "sampling",
    "load_source": "episodes.features.sources",
    "summarize": "episodes.evaluation.report",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: a command answers, also to Ctrl-C, before torch is there."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"protonet.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
