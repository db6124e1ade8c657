"""SimpleShot: the nearest mean of the support rows after a simple transformation of the features."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.prototypes import protonet


def simpleshot_un(episodes: Episodes) -> Tensor:
    """Classify by the squared Euclidean distance to the class means of the features as they are (UN).

    Args:
        episodes: Supports and queries, (episodes, rows, dim).

    Returns:
        Logits (episodes, n_queries, n_way): minus the distances.

    Source: Wang, Chao, Weinberger and van der Maaten, "SimpleShot: revisiting nearest-neighbor classification for
        few-shot learning" (2019), eq. 2. https://arxiv.org/abs/1911.04623
    """
    return protonet(episodes)


def simpleshot_l2n(episodes: Episodes) -> Tensor:
    """Classify by the squared Euclidean distance to the class means of rows of unit norm (L2N).

    Args:
        episodes: Supports and queries, (episodes, rows, dim).

    Returns:
        Logits (episodes, n_queries, n_way): minus the distances.

    Source: Wang et al., "SimpleShot" (2019), eq. 2 and "L2-normalization" below it. https://arxiv.org/abs/1911.04623
    """
    support, query = F.normalize(episodes.support, dim=2), F.normalize(episodes.query, dim=2)
    return protonet(episodes._replace(support=support, query=query))


def simpleshot_cl2n(episodes: Episodes) -> Tensor:
    """Classify by the squared Euclidean distance to the class means of centred rows of unit norm (CL2N).

    Args:
        episodes: Supports and queries, (episodes, rows, dim). The centre is the mean of the base classes' rows; without
            base classes, that of the episode's own support rows.

    Returns:
        Logits (episodes, n_queries, n_way): minus the distances.

    Source: Wang et al., "SimpleShot" (2019), eq. 2 and "Centering" below it. https://arxiv.org/abs/1911.04623
    """
    support, query, base = episodes.support, episodes.query, episodes.base
    centre = support.mean(dim=1, keepdim=True) if base is None else base.mean.to(support.dtype)
    return simpleshot_l2n(episodes._replace(support=support - centre, query=query - centre))
