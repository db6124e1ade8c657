"""Methods, one a file: from a batch of episodes to logits, higher is likelier.

Each is a function of `protonet.episodes.batch.Episodes`, the settings of its paper as keywords, and returns
(episodes, n_queries, n_way): numbers whose softmax are the method's own probabilities.
"""

from collections.abc import Callable

from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.prototypes import protonet, protonet_cosine

Method = Callable[[Episodes], Tensor]

#: Each query on its own.
INDUCTIVE: dict[str, Method] = {"protonet": protonet, "protonet-cosine": protonet_cosine}
#: All queries of an episode together.
TRANSDUCTIVE: dict[str, Method] = {}
METHODS = INDUCTIVE | TRANSDUCTIVE
