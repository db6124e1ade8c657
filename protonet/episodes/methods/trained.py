"""What methods share that need a meta-trained encoder."""

from __future__ import annotations

from protonet.episodes.draws.batch import Episodes, Trained
from protonet.errors import raise_input_error


def find_trained(episodes: Episodes, method: str, objective: str | None = None) -> Trained:
    """Return what was meta-trained for episodes.

    Args:
        episodes: Those of a method.
        method: Its name.
        objective: What it must be trained for; None for anything.

    Raises:
        InputError: There is no encoder, or it is one of another objective or for another number of classes.
    """
    trained = episodes.trained
    wanted = "come with an encoder" if objective is None else f"come with an encoder of the objective {objective}"
    remedy = f"Pass --encoder FILE, from train{'' if objective is None else f' --objective {objective}'}."
    if trained is None:
        raise_input_error("episodes", wanted, "none", remedy)
    if objective not in (None, trained.plan["objective"]):
        raise_input_error("episodes", wanted, f"one of {trained.plan['objective']}", remedy)
    n_way = getattr(trained.head, "n_way", None)
    if objective is not None and n_way not in (None, episodes.n_way):
        wanted = f"have {n_way} classes, as those that the encoder learned from"
        remedy = f"Pass --way {n_way}, or train with --head zero, for any number."
        raise_input_error("episodes", wanted, episodes.n_way, remedy)
    return trained
