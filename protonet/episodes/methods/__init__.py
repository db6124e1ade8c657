"""Few-shot methods, one paper per file: functions from a batch of episodes to logits.

A method takes `protonet.episodes.draws.batch.Episodes`, and the settings of its paper as keywords. It returns logits
(episodes, n_queries, n_way), whose softmax is the method's own probabilities. The numbers of a method that are not
keywords stand in a frozen dataclass of its module, with where each comes from.
"""

from collections.abc import Callable

from torch import Tensor

from protonet.episodes.draws.batch import Episodes
from protonet.episodes.methods.adaptive import adaptive
from protonet.episodes.methods.alpha_am import alpha_am
from protonet.episodes.methods.anil import anil
from protonet.episodes.methods.baseline_pp import baseline_pp
from protonet.episodes.methods.bd_cspn import bd_cspn
from protonet.episodes.methods.calibration import distribution_calibration
from protonet.episodes.methods.clip import clip_zero_shot
from protonet.episodes.methods.feat import feat
from protonet.episodes.methods.finetune import finetune
from protonet.episodes.methods.ilpc import ilpc
from protonet.episodes.methods.knn import nearest_neighbours
from protonet.episodes.methods.laplacian_shot import laplacian_shot, laplacian_shot_dirichlet
from protonet.episodes.methods.linear_finetune import linear_finetune
from protonet.episodes.methods.linear_probe import linear_probe
from protonet.episodes.methods.logistic import logistic_regression
from protonet.episodes.methods.mahalanobis import mahalanobis
from protonet.episodes.methods.maml import maml
from protonet.episodes.methods.matching import matching_networks
from protonet.episodes.methods.metaopt import metaopt_svm
from protonet.episodes.methods.oslo import oslo
from protonet.episodes.methods.paddle import paddle
from protonet.episodes.methods.proto_lp import proto_lp
from protonet.episodes.methods.prototypes import protonet, protonet_cosine
from protonet.episodes.methods.pt_map import pt_map
from protonet.episodes.methods.ridge import ridge_regression
from protonet.episodes.methods.semi_supervised import semi_kmeans, semi_kmeans_cluster, semi_kmeans_masked
from protonet.episodes.methods.simpleshot import simpleshot_cl2n, simpleshot_l2n
from protonet.episodes.methods.soft_kmeans import soft_kmeans
from protonet.episodes.methods.solver import solver
from protonet.episodes.methods.svm import linear_svm
from protonet.episodes.methods.tim import alpha_tim, tim, tim_dirichlet
from protonet.episodes.methods.tim_adm import tim_adm
from protonet.episodes.methods.tip_adapter import tip_adapter
from protonet.episodes.methods.transductive_finetune import transductive_finetune

Method = Callable[[Episodes], Tensor]

#: Methods that classify each query alone.
INDUCTIVE: dict[str, Method] = {
    "protonet": protonet,
    "protonet-cosine": protonet_cosine,
    "simpleshot": simpleshot_cl2n,
    "simpleshot-l2n": simpleshot_l2n,
    "matching-networks": matching_networks,
    "knn": nearest_neighbours,
    "ridge": ridge_regression,
    "logistic": logistic_regression,
    "linear-probe": linear_probe,
    "linear-svm": linear_svm,
    "metaopt-svm": metaopt_svm,
    "mahalanobis": mahalanobis,
    "distribution-calibration": distribution_calibration,
    "linear-finetune": linear_finetune,
    "baseline++": baseline_pp,
    "clip-zero-shot": clip_zero_shot,
    "tip-adapter": tip_adapter,
    "feat": feat,
    "maml": maml,
    "anil": anil,
    "finetune": finetune,
    "semi-kmeans": semi_kmeans,
    "semi-kmeans-cluster": semi_kmeans_cluster,
    "semi-kmeans-masked": semi_kmeans_masked,
    "adaptive": adaptive,
    "solver": solver,
}
#: Methods that classify all queries of an episode together.
TRANSDUCTIVE: dict[str, Method] = {
    "soft-kmeans": soft_kmeans,
    "bd-cspn": bd_cspn,
    "laplacian-shot": laplacian_shot,
    "laplacian-shot-dirichlet": laplacian_shot_dirichlet,
    "tim": tim,
    "tim-dirichlet": tim_dirichlet,
    "tim-adm": tim_adm,
    "alpha-tim": alpha_tim,
    "pt-map": pt_map,
    "ilpc": ilpc,
    "proto-lp": proto_lp,
    "alpha-am": alpha_am,
    "paddle": paddle,
    "oslo": oslo,
    "transductive-finetune": transductive_finetune,
}
METHODS = INDUCTIVE | TRANSDUCTIVE
#: Other names of methods: SimpleShot on untransformed features is the nearest mean.
ALIASES = {"simpleshot-un": "protonet"}
#: Methods that use the base classes if there are any, and those that need them.
CENTRED = ("simpleshot", "bd-cspn", "laplacian-shot", "laplacian-shot-dirichlet")
USES_BASE = frozenset({*CENTRED, "distribution-calibration"})
NEEDS_BASE = frozenset({"distribution-calibration"})
#: Methods that need texts that name the classes.
NEEDS_TEXTS = frozenset({"clip-zero-shot", "tip-adapter"})
#: Methods that need a meta-trained encoder, and of which objective; None for any.
NEEDS_ENCODER = {"feat": "feat", "maml": "maml", "anil": "anil", "finetune": None}
#: Those of them that embed rows anew, by an encoder that they adapt.
ADAPTS_ENCODER = frozenset({"maml", "anil", "finetune"})
#: Methods that need unlabelled rows; no other method looks at them.
NEEDS_UNLABELLED = frozenset({"semi-kmeans", "semi-kmeans-cluster", "semi-kmeans-masked"})
#: Methods that know a class by its mean alone, which is all that there is of base classes beside novel ones.
TAKES_MEANS = frozenset(
    {"protonet", "protonet-cosine", "simpleshot", "simpleshot-l2n", "soft-kmeans", "clip-zero-shot"}
)
#: Methods that take a tenth of a second an episode or much more: evaluated where they are named, not by "all".
SLOW = frozenset({"alpha-am", "distribution-calibration", "finetune", "solver"})
