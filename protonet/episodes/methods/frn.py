"""Feature map reconstruction: a query's map, place by place, as a ridge regression on the places of a class's maps."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet.episodes.methods.common import one_hot, split_positions
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes

RIDGE_OFFSET = 1e-6  #: Added to the ridge, as in the authors' code.


def feature_map_reconstruction(
    episodes: Episodes, *, ridge: Positive = 1.0, shrinkage: Positive = 1.0, scale: Positive = 1.0
) -> Tensor:
    """Classify by how well the places of a class's maps reconstruct those of a query's, in closed form.

    The paper learns its three numbers together with the encoder; the defaults are where its training begins. As in its
    code for ResNet-12, features are divided by the square root of the channels.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating, and their shape.
        ridge: The exponential of the paper's alpha, > 0, times the places of a class's support over the channels.
        shrinkage: The exponential of the paper's beta, > 0: the factor on reconstructions.
        scale: The paper's gamma, > 0: the factor on the logits.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: The rows are not maps.

    Source: Wertheimer, Tang and Hariharan, "Few-shot classification with feature map reconstruction networks" (2021),
        eqs. 4 to 8. https://arxiv.org/abs/2012.01506
    """
    support, query = split_positions(episodes)
    n_positions, channels = query.shape[2:]
    support, query = (maps.flatten(1, 2) / channels**0.5 for maps in (support, query))  # (episodes, ., channels)
    hot = one_hot(episodes.support_labels, episodes.n_way, support.dtype)  # (episodes, n_support, n_way)
    gram, inner = support @ support.transpose(1, 2), query @ support.transpose(1, 2)
    norms = query.square().sum(dim=2)  # (episodes, n_queries * places)
    eye = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    logits = []
    for inside in hot.repeat_interleave(n_positions, dim=1).unbind(2):  # (episodes, n_support * places), of each class
        masked_gram = gram * inside[:, :, None] * inside[:, None, :]
        penalty = ridge * inside.sum(dim=1) / channels + RIDGE_OFFSET
        across = inner * inside[:, None, :]
        # In the space of the class's places, which are fewer than channels: eq. 8. Others have zeros throughout.
        weights = torch.linalg.solve(masked_gram + penalty[:, None, None] * eye, across.transpose(1, 2)).transpose(1, 2)
        fit, size = (weights * across).sum(dim=2), (weights @ masked_gram * weights).sum(dim=2)
        distances = norms - 2 * shrinkage * fit + shrinkage**2 * size
        logits.append(-scale * distances.unflatten(1, (-1, n_positions)).mean(dim=2))
    return torch.stack(logits, dim=2).to(episodes.query.dtype)
