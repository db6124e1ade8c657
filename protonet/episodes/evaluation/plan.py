"""The settings of an evaluation, as the command asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from protonet.episodes.features.sources import RowsPlan
from protonet.episodes.methods.choice import ChosenMethod
from protonet.episodes.samplers.sampler import Sampler


@dataclass(frozen=True)
class MethodsPlan:
    """The methods to evaluate."""

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
            tuned = [choice for choice in best if choice.key == against.key and not against.keywords]
            against = (tuned or [against])[0]
            chosen.append(against)
        return replace(self, chosen=chosen, against=against)


@dataclass(frozen=True)
class EvaluationPlan:
    """All settings of an evaluation."""

    rows: RowsPlan
    methods: MethodsPlan
    sampler: Sampler  #: The kind of episodes, as far as it is known without the data.
    n_episodes: int  #: Largest number of episodes.
    #: Stop once the half-widths of all 95 % intervals are below this many percentage points; 0: never.
    target_half_width: float = 0.0
    seed: int = 0  #: Seed of the episodes.
    device: str = "cpu"  #: The device on which rows are embedded and classified.
    #: Keep the prediction and the row of each query; ways, shots and queries must then be the same in each episode.
    records: bool = False

    def describe(self, side: str, sampler: Sampler) -> dict[str, object]:
        """Return the settings under the names of the command line, in a form that JSON can write.

        Args:
            side: The one that was evaluated.
            sampler: The kind of episodes, of the data.
        """
        against = self.methods.against
        rows = asdict(self.rows)
        if self.rows.validation_dataset is None:
            del rows["validation_dataset"]
        return {
            **rows,
            "side": side,
            "hierarchy": None,
            **sampler.describe(),
            "max_episodes": self.n_episodes,
            "target_half_width": self.target_half_width,
            "seed": self.seed,
            "tune": [[choice.name for choice in grid] for grid in self.methods.tune],
            "against": None if against is None else against.name,
            **({} if self.device == "cpu" else {"device": self.device}),
            **({"records": True} if self.records else {}),
        }
