"""Covariances of features, shrunken, and what directions are worth by them to tell classes apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from protonet.losses import CHUNK


@dataclass(frozen=True)
class CovarianceRules:
    """How covariances are shrunken, and what is tried for the spread of class means."""

    pooled: float = 0.2
    """Share of a covariance's eigenvalues, the least ones, that get one value where rows are as many as features."""
    null: float = 1e-14  #: Share of the largest eigenvalue below which one is rounding.
    smoothing: float = 0.35  #: Power of the dimension in the bandwidth of the shrinkage; Ledoit and Wolf 2022.
    powers: int = 5
    """Powers in [0, 1] that are tried for the spread of class means along a direction, given that of its rows ..."""
    strengths: tuple[float, float, int] = (-6.0, 3.0, 91)
    """... and how large it is: least and largest power of ten, and how many are tried."""


COVARIANCE = CovarianceRules()


class Covariance(NamedTuple):
    """A covariance as an eigenbasis: ``basis`` (dim, rank), ``variances`` (rank,), ``rest`` off the basis."""

    basis: Tensor
    variances: Tensor
    rest: Tensor


def shrink_covariance(residuals: Tensor, degrees: int) -> Covariance:
    """Estimate a covariance by quadratic-inverse shrinkage of its eigenvalues.

    Nonlinear shrinkage: every eigenvalue gets its own correction, so that a few huge directions do not force
    the small ones up as a single linear shrinkage towards the identity does.

    Args:
        residuals: (n, dim) centred rows, floating.
        degrees: Degrees of freedom of the residuals; with none of them nothing is known, and nothing varies.

    Returns:
        The eigenvectors with a positive sample eigenvalue, their shrunken variances, and the variance that is
        given to every other direction (0-d; 0 if there is none).

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

    # Features that are constant or copies of others add no dimension.
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
        rest = variances.min() if rank < dim else sample.new_zeros(())
    else:
        variances = 1 / (inverse * amplitude)
        rest = 1 / ((dim / rank - 1) * inverse.mean())
    # Where rows and features are about as many, the least eigenvalues are far too small even so: pool the lowest.
    variances = variances.clamp_min(variances[int(COVARIANCE.pooled * min(ratio, 1 / ratio) * rank)])
    keep_trace = sample.sum() / (variances.sum() + (dimension - rank) * rest)
    return Covariance(basis, variances * keep_trace, rest * keep_trace)


def discriminant_gains(within: Tensor, between: Tensor, multiplicity: Tensor, shots: float) -> Tensor:
    """Gains of the view in which cosine scores a query as the Gaussian posterior predictive would.

    Class means are drawn with variance ``b = strength * within**power`` along each direction, the two numbers
    fitted by maximum likelihood to the observed spread of the means, and each mean is known from ``shots``
    samples. The linear part of the log predictive is ``x' diag(g) m`` with
    ``g = shots b / (within (within + (shots + 1) b))``.

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
