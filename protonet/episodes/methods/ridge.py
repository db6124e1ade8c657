"""Ridge regression onto the one-hot labels, the closed-form solver of R2-D2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import cosines, one_hot
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes


def ridge_regression(
    episodes: Episodes, *, penalty: Positive = 1.0, scale: Positive = 10.0, shift: float = 0.0
) -> Tensor:
    """Classify by ridge regression from rows of unit norm, with a one added for the bias, onto the one-hot labels.

    The paper learns its three numbers together with the encoder. The defaults are our own choice, for features of an
    encoder that did not learn with them; hence also the unit norm.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        penalty: The paper's lambda, > 0: the ridge.
        scale: The paper's alpha, > 0: the factor on the predicted labels.
        shift: The paper's beta: added to all logits.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Bertinetto, Henriques, Torr and Vedaldi, "Meta-learning with differentiable closed-form solvers" (2019),
        eqs. 5 and 6. https://arxiv.org/abs/1805.08136
    """
    rows = F.normalize(episodes.support, dim=2)
    gram = rows @ rows.transpose(1, 2) + 1  # X X^T (episodes, n_support, n_support), with the ones of the bias
    target = one_hot(episodes.support_labels, episodes.n_way, rows.dtype)
    eye = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    coefficients: Tensor = torch.linalg.solve(gram + penalty * eye, target)
    return scale * (cosines(episodes.query, rows) + 1) @ coefficients + shift  # eq. 6
