"""Few-shot methods, one family per file: functions from a batch of episodes to logits.

A method takes `protonet.episodes.samplers.batch.Episodes`: support (episodes, n_support, dim) and queries (episodes,
n_queries, dim), floating. Its keywords are the settings of its paper. It returns logits (episodes, n_queries, n_way) of
the dtype of the queries, whose softmax is the method's own probabilities. Docstrings of methods do not repeat this.

The fields of a `MethodSpec` state what the method needs: base classes, texts (episodes, n_way, dim), unlabelled rows
(episodes, n_unlabelled, dim), an encoder, or rows that are flattened feature maps. Without it, an InputError is raised.
Other constants of a method are in a frozen dataclass of its module, with their sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from protonet.episodes.methods import clustering, linear
from protonet.episodes.methods.adaptive import adaptive, solver
from protonet.episodes.methods.encoders import anil, feat, finetune, maml
from protonet.episodes.methods.maps import cross_transformers, deepbdc, deepemd, feature_map_reconstruction
from protonet.episodes.methods.prototypes import (
    clip_zero_shot,
    matching_networks,
    nearest_neighbours,
    protonet,
    protonet_cosine,
    simpleshot_cl2n,
    simpleshot_l2n,
    tip_adapter,
)
from protonet.episodes.methods.svm import linear_svm, metaopt_svm
from protonet.episodes.methods.tim import alpha_am, alpha_tim, tim, tim_adm, tim_dirichlet, transductive_finetune
from protonet.episodes.methods.transport import ilpc, proto_lp, pt_map
from protonet.episodes.samplers.batch import Episodes

__all__ = ["METHODS", "Method", "MethodInput", "MethodSpec"]

#: A method: it maps a batch of episodes to logits (episodes, n_queries, n_way).
Method = Callable[[Episodes], Tensor]
#: Inputs that a method may need in addition to support and queries: base classes, texts that name the classes,
#: unlabelled rows, a meta-trained encoder, or rows that are feature maps (maps).
MethodInput = Literal["base", "texts", "unlabelled", "encoder", "maps"]


@dataclass(frozen=True)
class MethodSpec:
    """A few-shot method: its function, required inputs and properties. It can be called like the function."""

    function: Callable[..., Tensor]  #: Maps a batch of episodes, and settings, to logits.
    transductive: bool = False  #: Whether the method classifies all queries of an episode together, not each alone.
    assumes_balance: bool = False
    """Whether the method assumes that an episode has equally many queries of each class: by a quota, or by a term of
    its loss whose default weight is for such queries."""
    needs: tuple[MethodInput, ...] = ()  #: Inputs without which the method cannot run.
    uses_base: bool = False  #: Whether the method uses base classes, if there are any.
    centred: bool = False
    """Whether the method subtracts the mean of the base rows or, without base classes, of the support rows."""
    objective: str | None = None  #: The objective that the encoder must have been trained with; None for any objective.
    adapts_encoder: bool = False  #: Whether the method adapts the encoder, and embeds rows again.
    needs_only_means: bool = False
    """Whether the method needs only the mean of each class. It can then also classify base classes, which are given by
    their means."""
    is_slow: bool = False  #: Whether an episode takes 0.1 seconds or more. The choice "all" leaves slow methods out.

    def __call__(self, episodes: Episodes, **settings: object) -> Tensor:
        """Compute logits (episodes, n_queries, n_way)."""
        return self.function(episodes, **settings)


#: The methods of this package, by their names on the command line: inductive ones, then transductive ones.
METHODS = {
    "protonet": MethodSpec(protonet, needs_only_means=True),
    "protonet-cosine": MethodSpec(protonet_cosine, needs_only_means=True),
    "simpleshot": MethodSpec(simpleshot_cl2n, uses_base=True, centred=True, needs_only_means=True),
    "simpleshot-l2n": MethodSpec(simpleshot_l2n, needs_only_means=True),
    "matching-networks": MethodSpec(matching_networks),
    "knn": MethodSpec(nearest_neighbours),
    "ridge": MethodSpec(linear.ridge_regression),
    "logistic": MethodSpec(linear.logistic_regression),
    "linear-probe": MethodSpec(linear.linear_probe),
    "linear-svm": MethodSpec(linear_svm),
    "metaopt-svm": MethodSpec(metaopt_svm),
    "mahalanobis": MethodSpec(linear.mahalanobis),
    "distribution-calibration": MethodSpec(
        linear.distribution_calibration, needs=("base",), uses_base=True, is_slow=True
    ),
    "linear-finetune": MethodSpec(linear.linear_finetune),
    "baseline++": MethodSpec(linear.baseline_pp),
    "clip-zero-shot": MethodSpec(clip_zero_shot, needs=("texts",), needs_only_means=True),
    "tip-adapter": MethodSpec(tip_adapter, needs=("texts",)),
    "feat": MethodSpec(feat, needs=("encoder",), objective="feat"),
    "maml": MethodSpec(maml, needs=("encoder",), objective="maml", adapts_encoder=True),
    "anil": MethodSpec(anil, needs=("encoder",), objective="anil", adapts_encoder=True),
    "frn": MethodSpec(feature_map_reconstruction, needs=("maps",)),
    "ctx": MethodSpec(cross_transformers, needs=("maps",)),
    "deepbdc": MethodSpec(deepbdc, needs=("maps",), is_slow=True),
    "deepemd": MethodSpec(deepemd, needs=("maps",), is_slow=True),
    "finetune": MethodSpec(finetune, needs=("encoder",), adapts_encoder=True, is_slow=True),
    "semi-kmeans": MethodSpec(clustering.semi_kmeans, needs=("unlabelled",)),
    "semi-kmeans-cluster": MethodSpec(clustering.semi_kmeans_cluster, needs=("unlabelled",)),
    "semi-kmeans-masked": MethodSpec(clustering.semi_kmeans_masked, needs=("unlabelled",)),
    "adaptive": MethodSpec(adaptive),
    "solver": MethodSpec(solver, is_slow=True),
    "soft-kmeans": MethodSpec(clustering.soft_kmeans, transductive=True, needs_only_means=True),
    "bd-cspn": MethodSpec(clustering.bd_cspn, transductive=True, uses_base=True, centred=True),
    "laplacian-shot": MethodSpec(clustering.laplacian_shot, transductive=True, uses_base=True, centred=True),
    "laplacian-shot-dirichlet": MethodSpec(
        clustering.laplacian_shot_dirichlet, transductive=True, uses_base=True, centred=True
    ),
    "tim": MethodSpec(tim, transductive=True, assumes_balance=True),
    "tim-dirichlet": MethodSpec(tim_dirichlet, transductive=True),
    "tim-adm": MethodSpec(tim_adm, transductive=True, assumes_balance=True),
    "alpha-tim": MethodSpec(alpha_tim, transductive=True),
    "pt-map": MethodSpec(pt_map, transductive=True, assumes_balance=True),
    "ilpc": MethodSpec(ilpc, transductive=True, assumes_balance=True),
    "proto-lp": MethodSpec(proto_lp, transductive=True, assumes_balance=True),
    "alpha-am": MethodSpec(alpha_am, transductive=True, is_slow=True),
    "paddle": MethodSpec(clustering.paddle, transductive=True),
    "oslo": MethodSpec(clustering.oslo, transductive=True),
    "transductive-finetune": MethodSpec(transductive_finetune, transductive=True),
}
