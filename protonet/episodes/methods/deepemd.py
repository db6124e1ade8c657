"""DeepEMD: the earth mover's distance between the positions of a query's feature map and those of a class."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import draw_orders, one_hot
from protonet.episodes.methods.keywords import BelowOne, Count, Fraction, Positive, PositiveCount
from protonet.episodes.methods.maps import reshape_to_positions
from protonet.episodes.methods.svm import INTERIOR_POINT, compute_max_step
from protonet.episodes.samplers.batch import Episodes

POSITION_WEIGHT_OFFSET = 1e-3 + 1e-5  #: Added to the weights of positions, as in the authors' code.
#: Number of flows, one per pair of positions, that are computed at a time, to fit into processor caches.
FLOWS_PER_BLOCK = 2**17


def deepemd(
    episodes: Episodes,
    *,
    scale: Positive = 12.5,
    steps: Count = 100,
    batch_size: PositiveCount = 4,
    learning_rate: Positive = 100.0,
    momentum: BelowOne = 0.9,
    dampening: Fraction = 0.9,
    seed: int = 0,
) -> Tensor:
    """Classify by the earth mover's distance between the positions of a query's feature map and those of a class.

    The cost of a move is 1 minus the cosine of two positions, each centred over its channels. The weight of a position
    is its inner product with the mean of the other feature map. At one shot, a class is the feature map of its support
    row. With more shots, the feature maps of the classes are the weights of the paper's structured layer: they start at
    the class means, and are trained on the support rows. All defaults are those of the authors' code.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating, which are flattened
            feature maps of the shape ``episodes.shape``.
        scale: The factor on the logits, > 0, which the authors call a temperature.
        steps: Passes over the support rows in the training of classes with several rows, >= 0; 0 for class means.
        batch_size: Rows per step, >= 1; the last step of a pass has the remaining rows.
        learning_rate: > 0.
        momentum: In [0, 1).
        dampening: In [0, 1]; gradients enter the momentum times 1 - dampening.
        seed: The seed of the order of the rows in each pass, the same in every episode.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: The rows are not feature maps: the episodes have no shape.

    Source: Zhang, Cai, Lin and Shen, "DeepEMD: few-shot image classification with differentiable earth mover's distance
        and structured classifiers" (2020), sec. 3, with the 1e-3 and 1e-5 that its code adds to weights.
        https://arxiv.org/abs/2003.06777
    """
    support, query = reshape_to_positions(episodes)
    hot = one_hot(episodes.support_labels, episodes.n_way, support.dtype)  # (episodes, n_support, n_way)
    classes = torch.einsum("esw,espc->ewpc", hot / hot.sum(dim=1, keepdim=True), support)
    n_support = support.shape[1]
    orders = draw_orders(steps * (n_support > episodes.n_way), n_support, torch.Generator().manual_seed(seed))
    velocity, gradient_weight = torch.zeros_like(classes), 1.0  # the first gradient is not dampened
    for order in orders.to(support.device):
        for rows in order.split(batch_size):
            gradient = _compute_gradient(support[:, rows], classes, hot[:, rows], scale)
            velocity = momentum * velocity + gradient_weight * gradient
            classes = classes - learning_rate * velocity
            gradient_weight = 1 - dampening
    return compute_emd_logits(query, classes, scale).to(episodes.query.dtype)


def _compute_gradient(rows: Tensor, classes: Tensor, hot: Tensor, scale: float) -> Tensor:
    """Compute the gradient of the mean cross-entropy of rows with respect to the feature maps of classes.

    Flows and weights of positions count as constants. Shapes are those of `compute_emd_logits`.
    """
    with torch.enable_grad():
        classes = classes.detach().requires_grad_()
        losses = -(compute_emd_logits(rows, classes, scale).log_softmax(dim=2) * hot).sum(dim=2)
        (gradient,) = torch.autograd.grad(losses.mean(dim=1).sum(), classes)
    return gradient


def compute_emd_logits(rows: Tensor, classes: Tensor, scale: float) -> Tensor:
    """Compute logits (episodes, n, n_way) from the earth mover's distances between feature maps of rows and classes.

    A logit is ``scale`` times the mean cosine along the optimal flow from the positions of the row to those of the
    class. Rows are (episodes, n, positions, channels), classes (episodes, n_way, positions, channels).
    """
    n_positions = rows.shape[2]
    unit = [F.normalize(maps - maps.mean(dim=3, keepdim=True), dim=3) for maps in (rows, classes)]
    cosines = torch.einsum("enpc,ewqc->enwpq", *unit)
    with torch.no_grad():
        supply = torch.einsum("enpc,ewc->enwp", rows, classes.mean(dim=2)).relu() + POSITION_WEIGHT_OFFSET
        demand = torch.einsum("ewqc,enc->enwq", classes, rows.mean(dim=2)).relu() + POSITION_WEIGHT_OFFSET
        weights = (n_positions * weight / weight.sum(dim=3, keepdim=True) for weight in (supply, demand))
        n_problems = max(1, FLOWS_PER_BLOCK // n_positions**2)
        problems = (part.flatten(0, 2).split(n_problems) for part in (1 - cosines, *weights))
        flows = torch.cat([solve_optimal_transport(*some) for some in zip(*problems, strict=True)]).view_as(cosines)
    return scale / n_positions * (cosines * flows).sum(dim=(3, 4))


def solve_optimal_transport(costs: Tensor, supply: Tensor, demand: Tensor) -> Tensor:
    """Minimise ``sum(costs * flow)`` over flows >= 0 whose rows sum to the supply and whose columns to the demand.

    The algorithm is Mehrotra's predictor-corrector method. It starts at flows and dual prices that satisfy all
    equations, so that it only has to close the duality gap, the sum of flows times slacks.

    Args:
        costs: (problems, n, m) float64.
        supply: (problems, n), > 0.
        demand: (problems, m), > 0, with the sum of the supply.

    Returns:
        The optimal flows (problems, n, m).

    Source: Nocedal and Wright, "Numerical optimization" (2006), alg. 14.3, for transport.
    """
    flow = supply[:, :, None] * demand[:, None, :] / supply.sum(dim=1)[:, None, None]
    slack = costs - costs.amin(dim=(1, 2), keepdim=True) + 1  # the costs less the prices of both ends
    first = (flow * slack).mean(dim=(1, 2), keepdim=True)
    for _ in range(INTERIOR_POINT.max_steps):
        gap = (flow * slack).mean(dim=(1, 2), keepdim=True)
        going = gap > INTERIOR_POINT.max_duality_gap * first
        if not bool(going.any()):
            break
        barrier_ratio = flow / slack
        sums = barrier_ratio.sum(dim=2, keepdim=True)
        # The coupling of the columns' prices through rows. Prices have no origin, so the last one is fixed. The
        # diagonal is the sum of the other entries, without a difference of nearly equal numbers.
        linked = barrier_ratio.transpose(1, 2) @ (barrier_ratio / sums)
        linked.diagonal(dim1=1, dim2=2).zero_()
        factor, failed = torch.linalg.cholesky_ex((torch.diag_embed(linked.sum(dim=2)) - linked)[:, :-1, :-1])
        going = going & (failed == 0)[:, None, None]  # flows stay where rounding leaves no step
        system = BarrierSystem(slack, barrier_ratio, sums, factor, supply - flow.sum(dim=2), demand - flow.sum(dim=1))
        flow_step, slack_step = system.solve(flow * slack)
        predicted_flow = flow + compute_max_step(flow, flow_step) * flow_step
        predicted = predicted_flow * (slack + compute_max_step(slack, slack_step) * slack_step)
        centre = (predicted.mean(dim=(1, 2), keepdim=True) / gap) ** 3 * gap
        flow_step, slack_step = system.solve(flow * slack + flow_step * slack_step - centre)
        flow = (flow + INTERIOR_POINT.boundary_fraction * compute_max_step(flow, flow_step) * flow_step).where(
            going, flow
        )
        slack = (slack + INTERIOR_POINT.boundary_fraction * compute_max_step(slack, slack_step) * slack_step).where(
            going, slack
        )
    return flow


class BarrierSystem(NamedTuple):
    """The linear equations of one step of `solve_optimal_transport`, for each transport problem."""

    slack: Tensor  #: (problems, n, m) > 0, the costs less the dual prices of both ends.
    barrier_ratio: Tensor  #: (problems, n, m), flows over slacks.
    sums: Tensor  #: (problems, n, 1), the sum of the ratios of each row.
    factor: Tensor  #: (problems, m - 1, m - 1), the Cholesky factor of the system for all column prices but the last.
    missing_supply: Tensor  #: (problems, n), the supply less the sums of flows over columns: rounding errors.
    missing_demand: Tensor  #: (problems, m), the demand less the sums of flows over rows: rounding errors.

    def solve(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the step that lowers the products of flows and slacks by ``product`` (problems, n, m).

        Returns:
            flow_step: (problems, n, m), the change of the flows.
            slack_step: (problems, n, m), the change of the slacks.
        """
        free = product / self.slack
        rows = (self.missing_supply + free.sum(dim=2))[:, :, None]
        coupled = self.barrier_ratio.transpose(1, 2) @ (rows / self.sums)
        columns = (self.missing_demand + free.sum(dim=1))[:, :, None] - coupled
        prices = F.pad(torch.cholesky_solve(columns[:, :-1], self.factor), (0, 0, 0, 1))  # (problems, m, 1)
        rise = (rows - self.barrier_ratio @ prices) / self.sums + prices.transpose(1, 2)  # of the prices of both ends
        return self.barrier_ratio * rise - free, -rise
