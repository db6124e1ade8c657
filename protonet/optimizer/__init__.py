"""CustomOptimizer: one optimizer for every workload, which finds its own step size.

The direction is Adam's in the eigenbasis of the gradients' second moments (SOAP). Half of the step follows
a mean of many more steps. The step size is one number for all parameters. A search raises it until the slope that the
new gradient sees along the last step turns uphill. From then on it follows that slope, less and less, and falls with
the number of steps. If that number is known, it falls to nothing. Each direction of the eigenbases has a factor, too.
"""

from protonet.optimizer.optimizer import CustomOptimizer
from protonet.optimizer.stepper import StackOptimizer

__all__ = ["CustomOptimizer", "StackOptimizer"]
