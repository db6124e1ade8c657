"""CLIP without training: the class whose text is nearest."""

from __future__ import annotations

from torch import Tensor

from protonet.episodes.methods.common import cosines
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes
from protonet.errors import raise_input_error


def clip_zero_shot(episodes: Episodes, *, temperature: Positive = 0.01) -> Tensor:
    """Classify by the cosine to the embeddings of texts that name the classes; the support is not looked at.

    Args:
        episodes: Query (episodes, n_queries, dim) and texts (episodes, n_way, dim), floating.
        temperature: > 0, divides the cosines. CLIP's learned scale of 100 is 1 / 0.01.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: There are no texts.

    Source: Radford et al., "Learning transferable visual models from natural language supervision" (2021), sec. 3.1.
        https://arxiv.org/abs/2103.00020
    """
    return cosines(episodes.query, get_texts(episodes)) / temperature


def get_texts(episodes: Episodes) -> Tensor:
    """Return the texts of a batch, or raise an InputError that names the function that needs them."""
    if episodes.texts is None:
        raise_input_error("texts", "be known", None, "Give the experiment `texts`, or leave this method out.")
    return episodes.texts
