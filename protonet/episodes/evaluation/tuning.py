"""Choose the settings of methods by their accuracy on validation classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from tqdm import tqdm

from protonet._checks import fail
from protonet.datasets import Dataset
from protonet.episodes.evaluation.distributed import Group
from protonet.episodes.evaluation.evaluate import Scores, evaluate
from protonet.episodes.evaluation.material import PROG, Experiment, prepare
from protonet.episodes.evaluation.statistics import half_width, mean_of
from protonet.episodes.methods.choice import ChosenMethod

MOST_EPISODES = 500  #: Settings are compared on as many episodes as are evaluated, but on no more than these.


class Tuning(NamedTuple):
    """What settings of a method are worth on validation classes."""

    chosen: ChosenMethod  #: The method with the settings of the highest mean accuracy, the first of equals.
    accuracies: dict[str, Tensor]  #: For each name of the method with settings (episodes,) float64.
    n_classes: int  #: Validation classes.

    def describe(self) -> dict[str, Any]:
        """Return it in a form that JSON can write."""
        found = {
            name: {"accuracy": mean_of(each), "half_width": half_width(each) if len(each) > 1 else None}
            for name, each in self.accuracies.items()
        }
        episodes = len(self.accuracies[self.chosen.name])
        return {"chosen": self.chosen.name, "classes": self.n_classes, "episodes": episodes, "accuracies": found}

    def __str__(self) -> str:
        """Return it as one line for people."""
        told = self.describe()
        rates = (f"{name} {100 * each['accuracy']:.2f}" for name, each in told["accuracies"].items())
        where = f"on {self.n_classes} validation classes, {told['episodes']:,} episodes"
        return f"{self.chosen.name} is the best of {len(self.accuracies)} settings {where}: {', '.join(rates)} %."


def tune(data: Dataset, experiment: Experiment, group: Group) -> list[Tuning]:
    """Evaluate the settings of each method to tune on the same episodes of validation classes.

    Args:
        data: The data set that the experiment names.
        experiment: The settings; the episodes are of its kind and seed, the classes are none of the evaluated ones.
        group: The processes that share the work.

    Returns:
        One result for each entry of ``experiment.tune``.

    Raises:
        InputError: There are no or too few validation classes, or they are those to be evaluated.
    """
    if not experiment.tune:
        return []
    sides = data.sides or ()
    evaluated = experiment.side or ("novel" if sides else "all")
    if evaluated in {"validation", "all"}:
        remedy = "Pass --side novel, of data with a split; --split-seed 0 makes one."
        fail(PROG, "--tune", "choose on other classes than the evaluated ones", f"--side {evaluated}", remedy)
    needed, found = experiment.setting.n_drawn, sides.count("validation")
    if found < needed:
        remedy = "Pass --split-seed 0 for a split with validation classes, or ask for fewer classes."
        fail(PROG, "--tune", f"find {needed} validation classes (--way and --open)", found, remedy)
    candidates = [choice for grid in experiment.tune for choice in grid]
    place = experiment._replace(side="validation", methods=candidates, every=False)
    material = prepare(data, place)
    n_episodes = min(experiment.n_episodes, MOST_EPISODES)
    bar = tqdm(total=n_episodes, desc="tune", unit="episode", delay=1.0, dynamic_ncols=True, disable=group.rank != 0)

    def show(batches: Sequence[Mapping[str, Scores]]) -> None:
        bar.update(sum(len(batch[candidates[0].name].accuracy) for batch in batches) - bar.n)

    scores = evaluate(
        material.x,
        material.by_class,
        material.methods,
        material.setting,
        seed=experiment.seed,
        n_episodes=n_episodes,
        base=material.base,
        texts=material.texts,
        trained=material.trained,
        group=group,
        progress=show,
        take=material.take,
    )
    bar.close()
    tunings = []
    for grid in experiment.tune:
        accuracies = {choice.name: scores[choice.name].accuracy for choice in grid}
        chosen = max(grid, key=lambda choice: mean_of(accuracies[choice.name]))
        tunings.append(Tuning(chosen, accuracies, len(material.by_class.size)))
    return tunings
