"""Few-shot experiments: episodes, methods, evaluation and meta-training.

Packages, which import earlier packages only: `samplers` sample episodes and gather their rows; `networks`
embed rows; `methods` classify queries; `features` loads data sets and embeds pictures; `evaluation` scores methods;
`paper` writes the tables and figures of a paper; `training` meta-trains encoders. `settings` declares the settings
of evaluations and of meta-training, and `options` those of the command lines.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protonet.episodes.evaluation.evaluate import evaluate
    from protonet.episodes.evaluation.report import format_evaluation, format_report, summarize
    from protonet.episodes.evaluation.run import evaluate_dataset
    from protonet.episodes.evaluation.statistics import Evaluation
    from protonet.episodes.features.sources import load_source
    from protonet.episodes.methods.choice import choose_methods
    from protonet.episodes.methods.keywords import SearchSpace
    from protonet.episodes.samplers.batch import Episodes
    from protonet.episodes.samplers.config import EpisodeConfig
    from protonet.episodes.samplers.fixed_split import FixedSplit
    from protonet.episodes.settings import EvaluationSettings
    from protonet.sampling import index_classes

__all__ = [
    "EpisodeConfig",
    "Episodes",
    "Evaluation",
    "EvaluationSettings",
    "FixedSplit",
    "SearchSpace",
    "choose_methods",
    "evaluate",
    "evaluate_dataset",
    "format_evaluation",
    "format_report",
    "index_classes",
    "load_source",
    "summarize",
]

_EPISODES_EXPORTS = {
    "Episodes": "episodes.samplers.batch",
    "Evaluation": "episodes.evaluation.statistics",
    "EvaluationSettings": "episodes.settings",
    "FixedSplit": "episodes.samplers.fixed_split",
    "EpisodeConfig": "episodes.samplers.config",
    "SearchSpace": "episodes.methods.keywords",
    "choose_methods": "episodes.methods.choice",
    "evaluate": "episodes.evaluation.evaluate",
    "evaluate_dataset": "episodes.evaluation.run",
    "format_evaluation": "episodes.evaluation.report",
    "format_report": "episodes.evaluation.report",
    "index_classes": "sampling",
    "load_source": "episodes.features.sources",
    "summarize": "episodes.evaluation.report",
}


def __getattr__(name: str) -> object:
    """Import a public name of this package at its first use: a command then starts without importing torch."""
    if name not in _EPISODES_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"protonet.{_EPISODES_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
