"""The settings of an evaluation, as the command asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from protonet.episodes.draws.sampler import Sampler
from protonet.episodes.features.sources import RowsPlan
from protonet.episodes.methods.choice import ChosenMethod


@dataclass(frozen=True)
class MethodsPlan:
    """Which methods classify them."""

    chosen: Sequence[ChosenMethod]  #: In the order of the report.
    every: bool = False  #: All methods that can run, before ``chosen``.
    #: For each method to tune, its settings; the best one on validation classes is evaluated, too.
    tune: Sequence[Sequence[ChosenMethod]] = ()
    against: ChosenMethod | None = None  #: Compared with each other one; None compares all pairs.

    def add_tuned(self, best: Sequence[ChosenMethod]) -> MethodsPlan:
        """Add the best settings of those to tune, and the method that others are compared with.

        If that is a method without settings that was tuned, it is the tuned one.
        """
        chosen, against = [*self.chosen, *best], self.against
        if against is not None:
            tuned = [each for each in best if each.key == against.key and not against.keywords]
            against = (tuned or [against])[0]
            chosen.append(against)
        return replace(self, chosen=chosen, against=against)


@dataclass(frozen=True)
class EvaluationPlan:
    """All settings of an evaluation."""

    rows: RowsPlan
    methods: MethodsPlan
    sampler: Sampler  #: The kind of episodes, as far as it is known without the data.
    n_episodes: int  #: Most episodes.
    #: Stop once the half-widths of all 95 % intervals are below this many percentage points; 0: never.
    until: float = 0.0
    seed: int = 0  #: Of the episodes.
    device: str = "cpu"  #: Where rows are embedded and classified.
    #: Keep what each query is taken for, and its row; ways, shots and queries are the same in each episode then.
    records: bool = False

    def describe(self, side: str, sampler: Sampler) -> dict[str, Any]:
        """Return the settings under the names of the command line, in a form that JSON can write.

        Args:
            side: The one that was evaluated.
            sampler: The kind of episodes, of the data.
        """
        against = self.methods.against
        rows = asdict(self.rows)
        if self.rows.validation is None:
            del rows["validation"]
        return {
            **rows,
            "side": side,
            "hierarchy": None,
            **sampler.describe(),
            "most_episodes": self.n_episodes,
            "until": self.until,
            "seed": self.seed,
            "tune": [[choice.name for choice in grid] for grid in self.methods.tune],
            "against": None if against is None else against.name,
            **({} if self.device == "cpu" else {"device": self.device}),
            **({"records": True} if self.records else {}),
        }
