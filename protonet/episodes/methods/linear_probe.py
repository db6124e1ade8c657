"""The linear probe of CLIP: logistic regression on the features as they are."""

from __future__ import annotations

from torch import Tensor

from protonet.episodes.methods.common import one_hot
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.methods.logistic import fit_logistic
from protonet.episodes.methods.mahalanobis import project_to_span
from protonet.episodes.samplers.batch import Episodes


def linear_probe(episodes: Episodes, *, inverse_penalty: Positive = 0.316) -> Tensor:
    """Classify by L2-penalised logistic regression on the rows as they are, its intercept not penalised.

    The effect of the penalty depends on the scale of the features; `logistic_regression` scales rows to unit norm.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        inverse_penalty: scikit-learn's C, > 0. The authors' code: 0.316, found on ImageNet.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Radford et al., "Learning transferable visual models from natural language supervision" (2021), sec. 3.2 and
        A.3, and the example of its code (README.md, "Linear-probe evaluation"). https://arxiv.org/abs/2103.00020
    """
    # In float64: the penalty is the same at any scale of the features, and float32 would lose it beside large squares.
    support, query = project_to_span(episodes.support.double(), episodes.query.double())
    target = one_hot(episodes.support_labels, episodes.n_way, support.dtype)
    weight, intercept = fit_logistic(support, target, inverse_penalty=inverse_penalty)
    return (query @ weight + intercept).to(episodes.query.dtype)
