"""CustomOptimizer: one optimizer for every workload, which finds its own step size.

A step is an Adam step in the eigenbasis of the gradients' second moments (SOAP), half of it along a gradient average
over many more steps. All parameters share one step size. It grows until the *slope*, the inner product of the new
gradient and the last step, shows that steps lead uphill. Then it follows the slopes with a decreasing gain, and decays
with the number of steps, nearly to zero if that number is known. Each eigenvector also has a step size factor.
"""

from protonet.optimizer.optimizer import CustomOptimizer
from protonet.optimizer.stepper import StackOptimizer

__all__ = ["CustomOptimizer", "StackOptimizer"]
