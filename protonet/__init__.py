"""Few-shot classification with prototype networks: a learned embedding, class prototypes in a buffer, cosine."""

from protonet.encoder import Encoder, plan_encoder
from protonet.network import PrototypeNetwork
from protonet.solver import solve

__all__ = ["Encoder", "PrototypeNetwork", "plan_encoder", "solve"]
