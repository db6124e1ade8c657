"""Shrinkage of covariances, and gains of directions by which they separate classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from protonet.losses import CHUNK


@dataclass(frozen=True)
class CovarianceRules:
    """Constants of the shrinkage, and the grid of priors on the variance of class means."""

    pooled: float = 0.2
    """Fraction of the eigenvalues, the smallest ones, that are replaced by one value if n rows equal n features."""
    null: float = 1e-14  #: An eigenvalue below this times the largest one is a rounding error.
    smoothing: float = 0.35  #: Power of the dimension in the bandwidth of the shrinkage; Ledoit and Wolf 2022.
    powers: int = 5  #: Number of powers in [0, 1] in the grid; see `discriminant_gains`.
    strengths: tuple[float, float, int] = (-6.0, 3.0, 91)
    """Grid of strengths: smallest and largest power of ten, and the number of values."""


COVARIANCE = CovarianceRules()


class Covariance(NamedTuple):
    """A covariance by its eigenvectors."""

    basis: Tensor  #: (dim, rank) orthonormal columns.
    variances: Tensor  #: (rank,) variances along these.
    orthogonal_variance: Tensor  #: 0-d: the variance along every direction orthogonal to the basis.


def shrink_covariance(residuals: Tensor, degrees: int) -> Covariance:
    """Estimate a covariance by quadratic-inverse shrinkage of its eigenvalues.

    Nonlinear shrinkage: every eigenvalue gets its own correction, so that a few huge directions do not force
    the small ones up as a single linear shrinkage towards the identity does.

    Args:
        residuals: (n, dim) centred rows, floating.
        degrees: Degrees of freedom of the residuals; with 0, the covariance is zero.

    Returns:
        The eigenvectors with a positive sample eigenvalue, their shrunken variances, and the variance of every other
        direction (0 if there is none).

    Source: Ledoit and Wolf, "Quadratic shrinkage for large covariance matrices", Bernoulli 28 (2022), sec. 4.
    """
    n, dim = residuals.shape
    if n < dim:  # the Gram matrix has the same positive spectrum and is smaller
        residuals = residuals.to(torch.float64)
        gram = residuals @ residuals.T
    else:
        chunks = (chunk.to(torch.float64) for chunk in residuals.split(CHUNK))
        gram = cast(Tensor, sum(chunk.T @ chunk for chunk in chunks))
    spectrum, left = torch.linalg.eigh(gram / max(1, degrees))
    rank = min(degrees, dim, int((spectrum > spectrum[-1] * COVARIANCE.null).sum()))
    if rank == 0:
        return Covariance(spectrum.new_zeros(dim, 0), spectrum.new_zeros(0), spectrum.new_zeros(()))
    sample = spectrum[-rank:]  # (rank,) ascending
    basis = left[:, -rank:]
    if n < dim:
        basis = torch.nn.functional.normalize(residuals.T @ basis, dim=0)  # (dim, rank)

    # Constant features and linear combinations of other features add no dimension.
    dimension = dim if rank == min(dim, degrees) else rank
    ratio = dimension / degrees
    bandwidth = min(ratio**2, ratio**-2) ** COVARIANCE.smoothing / dimension**COVARIANCE.smoothing
    inverse = 1 / sample
    gap = inverse[:, None] - inverse[None, :]
    kernel = inverse[:, None] / (gap**2 + (bandwidth * inverse[:, None]) ** 2)
    stein = (kernel * gap).mean(dim=0)  # the smoothed Stein shrinker
    conjugate = (kernel * bandwidth * inverse[:, None]).mean(dim=0)
    amplitude = stein**2 + conjugate**2
    if rank == dimension:
        quadratic = (1 - ratio) ** 2 + 2 * ratio * (1 - ratio) * stein + ratio**2 * amplitude
        variances = 1 / (inverse * quadratic)
        orthogonal_variance = variances.min() if rank < dim else sample.new_zeros(())
    else:
        variances = 1 / (inverse * amplitude)
        orthogonal_variance = 1 / ((dim / rank - 1) * inverse.mean())
    # If there are about as many rows as features, the smallest eigenvalues are still far too small: pool them.
    variances = variances.clamp_min(variances[int(COVARIANCE.pooled * min(ratio, 1 / ratio) * rank)])
    keep_trace = sample.sum() / (variances.sum() + (dimension - rank) * orthogonal_variance)
    return Covariance(basis, variances * keep_trace, orthogonal_variance * keep_trace)


def discriminant_gains(within: Tensor, between: Tensor, multiplicity: Tensor, shots: float) -> Tensor:
    """Compute the gains with which a cosine scores a query as the Gaussian posterior predictive does.

    Class means have a prior variance ``b = strength * within**power`` along each direction. Strength and power are
    fitted by maximum likelihood to the observed variance of the means, each of which is the mean of ``shots`` samples.
    The linear part of the log predictive is ``x' diag(g) m`` with ``g = shots b / (within (within + (shots + 1) b))``.

    Args:
        within: (directions,) variance of rows around their class means, > 0.
        between: (directions,) mean squared deviation of class means from the overall mean.
        multiplicity: (directions,) how many directions of the space each entry represents.
        shots: Samples per class, > 0.

    Returns:
        (directions,) ``sqrt(g)``.
    Source: Ioffe, "Probabilistic linear discriminant analysis" (2006), with a power-law prior.
    """
    power = torch.linspace(0, 1, COVARIANCE.powers, dtype=within.dtype, device=within.device)[:, None, None]
    unit = (between * multiplicity).sum() / multiplicity.sum()
    strength = torch.logspace(*COVARIANCE.strengths, dtype=within.dtype, device=within.device)[None, :, None]
    scaled = within / ((within * multiplicity).sum() / multiplicity.sum())
    prior = strength * unit * scaled**power  # (power, strength, direction)
    spread = prior + within / shots
    loss = ((spread.log() + between / spread) * multiplicity).sum(dim=-1)  # (power, strength)
    best = int(loss.argmin())
    b = prior[best // loss.shape[1], best % loss.shape[1]]
    return (shots * b / (within * (within + (shots + 1) * b))).sqrt()
