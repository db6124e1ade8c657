"""What methods share that need a meta-trained encoder."""

from __future__ import annotations

from protonet._checks import fail
from protonet.episodes.draws.batch import Episodes, Trained


def find_trained(episodes: Episodes, method: str, objective: str | None = None) -> Trained:
    """Return what was meta-trained for episodes.

    Args:
        episodes: Those of a method.
        method: Its name.
        objective: What it must be trained for; None for anything.

    Raises:
        InputError: There is no encoder, or it is one of another objective.
    """
    trained = episodes.trained
    wanted = "come with an encoder" if objective is None else f"come with an encoder of the objective {objective}"
    remedy = f"Pass --encoder FILE, from train{'' if objective is None else f' --objective {objective}'}."
    if trained is None:
        fail(method, "episodes", wanted, "none", remedy)
    if objective not in (None, trained.plan["objective"]):
        fail(method, "episodes", wanted, f"one of {trained.plan['objective']}", remedy)
    return trained
