"""Classifiers by the nearest class mean, support row or text: SimpleShot, matching networks, Tip-Adapter and others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import (
    compute_episode_centre,
    cosines,
    one_hot,
    squared_distances,
    squared_norms,
    support_means,
)
from protonet.episodes.methods.keywords import NonNegative, Positive, PositiveCount
from protonet.episodes.samplers.batch import Episodes
from protonet.errors import raise_input_error

#: Added to the votes of each class, which sum to 1, so that a class without neighbours has a finite logit. Our choice.
VOTE_OFFSET = 1e-6


def protonet(episodes: Episodes) -> Tensor:
    """Classify by the squared Euclidean distance to the class means.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eqs. 1 and 2.
        https://arxiv.org/abs/1703.05175
    """
    return squared_distances(episodes.query, support_means(episodes)).neg_()


def protonet_cosine(episodes: Episodes, *, temperature: Positive = 0.1) -> Tensor:
    """Classify by the cosine to the class means.

    Args:
        temperature: > 0, divides the cosines. 0.1 is our own choice; the paper learns it.

    Source: Gidaris and Komodakis, "Dynamic few-shot visual learning without forgetting" (2018), eq. 3.
        https://arxiv.org/abs/1804.09458
    """
    return cosines(episodes.query, support_means(episodes)) / temperature


def simpleshot_l2n(episodes: Episodes) -> Tensor:
    """Classify by the squared Euclidean distance to the class means of rows of unit norm (L2N).

    Source: Wang et al., "SimpleShot" (2019), eq. 2 and "L2-normalization" below it. https://arxiv.org/abs/1911.04623
    """
    means = _average_unit_rows(episodes.support, episodes)
    norms = torch.linalg.vector_norm(episodes.query, dim=2).clamp_min(torch.finfo(means.dtype).tiny ** 0.5)
    products = (means @ episodes.query.transpose(1, 2)).div_(norms[:, None])  # (episodes, n_way, n_queries)
    return _compute_negative_distances(products, means)


def simpleshot_cl2n(episodes: Episodes) -> Tensor:
    """Classify by the squared Euclidean distance to the class means of centred rows of unit norm (CL2N).

    Rows are centred by `compute_episode_centre`.

    Source: Wang et al., "SimpleShot" (2019), eq. 2 and "Centering" below it. https://arxiv.org/abs/1911.04623
    """
    support, query, centre = episodes.support, episodes.query, compute_episode_centre(episodes)
    means = _average_unit_rows(support - centre, episodes)
    # The many queries are not centred themselves: products with them follow from products with the queries.
    means_and_centre = torch.cat([means, centre], dim=1)
    offset = means_and_centre @ centre.transpose(1, 2)
    squares = squared_norms(query)[:, None]
    products = (means_and_centre @ query.transpose(1, 2)).sub_(offset)  # (episodes, n_way + 1, n_queries)
    centred_squares = squares - 2 * products[:, -1:] - offset[:, -1:]  # (episodes, 1, n_queries)
    directions = products[:, :-1] / centred_squares.clamp_min(torch.finfo(query.dtype).tiny).sqrt()
    # If centring reduces a query's squared norm to less than this fraction, the centred query is computed explicitly:
    # differences of inner products would be too inexact.
    min_centred_norm_fraction = 1e-2
    inexact = centred_squares < min_centred_norm_fraction * squares
    if bool(inexact.any()):  # queries close to the centre
        directions = (means @ F.normalize(query - centre, dim=2).transpose(1, 2)).where(inexact, directions)
    return _compute_negative_distances(directions, means)


def _average_unit_rows(support: Tensor, episodes: Episodes) -> Tensor:
    """Scale support rows (episodes, n_support, dim) to unit norm; compute their class means (episodes, n_way, dim)."""
    norms: Tensor = torch.linalg.vector_norm(support, dim=2).clamp_min(torch.finfo(support.dtype).tiny ** 0.5)
    hot = one_hot(episodes.support_labels, episodes.n_way, support.dtype).transpose(1, 2)
    return hot / hot.sum(dim=2, keepdim=True) / norms[:, None] @ support


def _compute_negative_distances(products: Tensor, means: Tensor) -> Tensor:
    """Compute negative squared distances of unit queries to class means, from their inner ``products``."""
    return (2 * products - 1 - squared_norms(means)[:, :, None]).transpose(1, 2)


def matching_networks(episodes: Episodes) -> Tensor:
    """Classify by attention to the support rows: the softmax of their cosines to the query, summed by class.

    This is the paper's classifier without full context embeddings, which belong to the encoder.

    Source: Vinyals, Blundell, Lillicrap, Kavukcuoglu and Wierstra, "Matching networks for one shot learning" (2016),
        eq. 1 and sec. 2.1.1. https://arxiv.org/abs/1606.04080
    """
    attention = cosines(episodes.query, episodes.support).softmax(dim=2)  # (episodes, n_queries, n_support)
    return (attention @ one_hot(episodes.support_labels, episodes.n_way, attention.dtype)).log()


def nearest_neighbours(episodes: Episodes, *, n_neighbours: PositiveCount = 5, temperature: Positive = 0.07) -> Tensor:
    """Classify by the nearest support rows, which vote with the exponential of their cosine to the query.

    The paper takes 200 neighbours from a whole data set. With all support rows this is `matching_networks` at a lower
    temperature. Logits are logarithms of the classes' votes.

    Args:
        n_neighbours: The number of neighbours, >= 1; all support rows if there are fewer. 5 is our own choice.
        temperature: > 0, divides the cosines. The paper uses 0.07.

    Source: Wu, Xiong, Yu and Lin, "Unsupervised feature learning via non-parametric instance discrimination" (2018),
        sec. 3.4. https://arxiv.org/abs/1805.01978
    """
    near = cosines(episodes.query, episodes.support).topk(min(n_neighbours, episodes.support.shape[1]), dim=2)
    hot = one_hot(episodes.support_labels, episodes.n_way, episodes.query.dtype)
    position = torch.arange(len(hot), device=hot.device).reshape(-1, 1, 1)
    classes = hot[position, near.indices]  # (episodes, n_queries, n_neighbours, n_way)
    weights = (near.values / temperature).softmax(dim=2)
    return ((weights[..., None] * classes).sum(dim=2) + VOTE_OFFSET).log()


def clip_zero_shot(episodes: Episodes, *, temperature: Positive = 0.01) -> Tensor:
    """Classify by the cosine to the embeddings of texts that name the classes, without the support.

    Args:
        temperature: > 0, divides the cosines. The default is 1 over CLIP's learned scale of 100.

    Source: Radford et al., "Learning transferable visual models from natural language supervision" (2021), sec. 3.1.
        https://arxiv.org/abs/2103.00020
    """
    return cosines(episodes.query, get_class_text_embeddings(episodes)) / temperature


def get_class_text_embeddings(episodes: Episodes) -> Tensor:
    """Get the embeddings of class texts (episodes, n_way, dim); raise an InputError if the episodes have no texts."""
    if episodes.texts is None:
        raise_input_error("texts", "be known", None, "Give the experiment `texts`, or leave this method out.")
    return episodes.texts


def tip_adapter(
    episodes: Episodes, *, alpha: NonNegative = 1.17, beta: Positive = 1.0, temperature: Positive = 0.01
) -> Tensor:
    """Classify by the cosine to texts that name the classes, plus votes of support rows weighted by their closeness.

    Defaults are the initial values of the authors' code on ImageNet (configs/imagenet.yaml). The code tunes them on a
    validation set; here ``--tune tip-adapter:alpha=1,2,5:beta=1,3,7`` does so.

    Args:
        alpha: The weight of the votes, >= 0.
        beta: How fast a row's vote falls with its distance, > 0.
        temperature: > 0, divides the cosines to texts, see `clip_zero_shot`.

    Source: Zhang et al., "Tip-Adapter: training-free adaption of CLIP for few-shot classification" (2022), sec. 3.
        https://arxiv.org/abs/2207.09519
    """
    by_text = clip_zero_shot(episodes, temperature=temperature)
    votes = (beta * (cosines(episodes.query, episodes.support) - 1)).exp()  # (episodes, n_queries, n_support)
    hot = one_hot(episodes.support_labels, episodes.n_way, votes.dtype)
    return by_text + alpha * votes @ hot
