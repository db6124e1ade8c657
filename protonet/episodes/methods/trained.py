"""Access to the meta-trained encoder, shared by the methods that need one."""

from __future__ import annotations

from protonet.episodes.samplers.batch import Episodes, Trained
from protonet.errors import raise_input_error


def get_trained(episodes: Episodes, method: str, objective: str | None = None) -> Trained:
    """Return the meta-trained encoder of episodes.

    Args:
        episodes: The episodes of a method.
        method: The name of the method, for messages.
        objective: The objective that the encoder must be trained for; None for any.

    Raises:
        InputError: There is no encoder, or it is one of another objective or for another number of classes.
    """
    trained = episodes.trained
    constraint = "come with an encoder" if objective is None else f"come with an encoder of the objective {objective}"
    remedy = f"Pass `encoder`, a file of train{'' if objective is None else f' with the objective {objective}'}."
    if trained is None:
        raise_input_error("episodes", constraint, "none", remedy)
    if objective not in (None, trained.plan["objective"]):
        raise_input_error("episodes", constraint, f"one of {trained.plan['objective']}", remedy)
    n_way = getattr(trained.head, "n_way", None)
    if objective is not None and n_way not in (None, episodes.n_way):
        constraint = f"have {n_way} classes, as those that the encoder learned from"
        remedy = f"Pass `way` {n_way}, or train with `head` zero, for any number."
        raise_input_error("episodes", constraint, episodes.n_way, remedy)
    return trained
