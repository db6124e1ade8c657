"""Few-shot experiments: episodes, methods, evaluation and meta-training.

Evaluation, from below: `draws` numbers episodes, `batch` gathers their rows, `methods` classify them, with settings
that `keywords` reads and `choice` applies; `evaluation` scores the methods, `state` keeps the scores, `statistics`
compares them, `report` writes the result. `material` is what an evaluation needs (`sources`, `normalization`), `tuning`
chooses settings, `experiment` is the whole evaluation, `suite` and `study` are many of them, and `compare` is of
several runs' files. `kinds` reads which episodes the command's options ask for, `presets` has those of papers; other
protocols than `draws` are `fixed_split`, `meta_dataset` and `generalized`.
Meta-training: `backbones`, some of them the papers' `networks`, learn for one of the `objectives`, perhaps with one of
the `heads`, on the `tasks`, whose rows `augmentation` changes, by the loop in `meta`, with `checkpoints`; `train` is
the command. Methods that adapt an encoder find it, and the rows before it, in `batch.Trained`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protonet.episodes.draws.batch import Episodes
    from protonet.episodes.draws.numbered import Setting
    from protonet.episodes.evaluation.evaluate import evaluate
    from protonet.episodes.evaluation.report import format_report, summarize
    from protonet.episodes.features.sources import load_source
    from protonet.episodes.methods.choice import choose_methods
    from protonet.sampling import index_classes

__all__ = [
    "Episodes",
    "Setting",
    "choose_methods",
    "evaluate",
    "format_report",
    "index_classes",
    "load_source",
    "summarize",
]

_ROOMS = {
    "Episodes": "episodes.batch",
    "Setting": "episodes.draws",
    "choose_methods": "episodes.choice",
    "evaluate": "episodes.evaluation",
    "format_report": "episodes.report",
    "index_classes": "sampling",
    "load_source": "episodes.sources",
    "summarize": "episodes.report",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: a command answers, also to Ctrl-C, before torch is there."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"protonet.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
