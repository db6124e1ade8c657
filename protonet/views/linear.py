"""Linear views of the features, fitted in closed form: raw, centred, scaled feature by feature, whitened.

A view is one affine map, diagonal plus low rank, whose output is compared by cosine. Its statistics come from
labelled samples without any gradient, so they are buffers.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from protonet._checks import fail
from protonet.losses import class_means

#: From the simplest to the most fitted; ties in selection go to the earlier one.
KINDS = ("raw", "centred", "standardised", "relevant", "robust", "whitened")


#: Rows that are worked on at a time: bounds the memory, not the data.
CHUNK = 8192
#: Share of a covariance's eigenvalues, the least ones, that get one value where rows are as many as features.
POOLED = 0.2
#: The constant coordinate of the views in ``LIFTED``, whose features have unit mean square.
LIFT, LIFTED = 3.0, ("standardised", "relevant", "robust", "whitened")


class LinearView(nn.Module):
    """The affine map ``z = gain * (x - shift) + ((x - shift) @ basis * coefficient) @ basis.T``.

    Args:
        shift: (dim,) what is subtracted.
        gain: (dim,) the diagonal part.
        basis: (dim, rank) orthonormal columns; rank may be 0.
        coefficient: (rank,) what is added to the diagonal along each column.
        lift: A constant that joins the view in the embedding; 0 for none. The plane becomes a sphere's cap, on which
            the cosine also sees how far from the mean a row is: of few features the direction alone tells too little.
    """

    shift: Tensor
    gain: Tensor
    basis: Tensor
    coefficient: Tensor

    def __init__(self, shift: Tensor, gain: Tensor, basis: Tensor, coefficient: Tensor, *, lift: float = 0.0) -> None:
        super().__init__()
        self.dim = len(shift)
        self.lift = lift
        self.embedding_dim = self.dim + bool(lift)
        for name, value in (("shift", shift), ("gain", gain), ("basis", basis), ("coefficient", coefficient)):
            self.register_buffer(name, value.to(torch.float32).clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map features (n, dim) to the view (n, dim)."""
        centred = x - self.shift  # (n, dim)
        if not self.basis.shape[1]:
            return centred.mul_(self.gain)
        return torch.addmm(centred * self.gain, (centred @ self.basis).mul_(self.coefficient), self.basis.T)

    def embed(self, z: Tensor) -> Tensor:
        """Return what of a view (n, dim) joins the embedding: (n, embedding_dim)."""
        return nn.functional.pad(z, (0, 1), value=self.lift) if self.lift else z


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
        degrees: Degrees of freedom of the residuals, at least 1.

    Returns:
        The eigenvectors with a positive sample eigenvalue, their shrunken variances, and the variance that is
        given to every other direction (0-d; 0 if there is none).

    Raises:
        ValueError: Values of magnitudes so far apart that there is no eigenbasis to be found.

    Source: Ledoit and Wolf, "Quadratic shrinkage for large covariance matrices", Bernoulli 28 (2022), sec. 4.
    """
    n, dim = residuals.shape
    if n < dim:  # the Gram matrix has the same positive spectrum and is smaller
        residuals = residuals.to(torch.float64)
        gram = residuals @ residuals.T
    else:
        chunks = (chunk.to(torch.float64) for chunk in residuals.split(CHUNK))
        gram = cast(Tensor, sum(chunk.T @ chunk for chunk in chunks))
    try:
        spectrum, left = torch.linalg.eigh(gram / degrees)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        remedy = "Mend the largest, or rescale their column."
        fail("solve", "train_loader", "hold numbers that can be compared", "values of too many magnitudes", remedy)
    rank = min(degrees, dim, int((spectrum > spectrum[-1] * 1e-14).sum()))
    if rank == 0:
        return Covariance(spectrum.new_zeros(dim, 0), spectrum.new_zeros(0), spectrum.new_zeros(()))
    sample = spectrum[-rank:]  # (rank,) ascending
    basis = left[:, -rank:]
    if n < dim:
        basis = torch.nn.functional.normalize(residuals.T @ basis, dim=0)  # (dim, rank)

    # Features that are constant or copies of others add no dimension.
    dimension = dim if rank == min(dim, degrees) else rank
    ratio = dimension / degrees
    bandwidth = min(ratio**2, ratio**-2) ** 0.35 / dimension**0.35
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
    variances = variances.clamp_min(variances[int(POOLED * min(ratio, 1 / ratio) * rank)])
    keep_trace = sample.sum() / (variances.sum() + (dimension - rank) * rest)
    return Covariance(basis, variances * keep_trace, rest * keep_trace)


def _discriminant_gains(within: Tensor, between: Tensor, multiplicity: Tensor, shots: float) -> Tensor:
    """Gains of the view in which cosine scores a query as the Gaussian posterior predictive would.

    Class means are drawn with variance ``b = strength * within**power`` along each direction, the two numbers
    fitted by maximum likelihood to the observed spread of the means, and each mean is known from ``shots``
    samples. The linear part of the log predictive is ``x' diag(g) m`` with
    ``g = shots b / (within (within + (shots + 1) b))``.

    Source: Ioffe, "Probabilistic linear discriminant analysis" (2006), with a power-law prior.
    """
    power = torch.linspace(0, 1, 5, dtype=within.dtype)[:, None, None]
    unit = (between * multiplicity).sum() / multiplicity.sum()
    strength = torch.logspace(-6, 3, 91, dtype=within.dtype)[None, :, None]
    scaled = within / ((within * multiplicity).sum() / multiplicity.sum())
    prior = strength * unit * scaled**power  # (power, strength, direction)
    spread = prior + within / shots
    loss = ((spread.log() + between / spread) * multiplicity).sum(dim=-1)  # (power, strength)
    best = int(loss.argmin())
    b = prior[best // loss.shape[1], best % loss.shape[1]]
    return (shots * b / (within * (within + (shots + 1) * b))).sqrt()


def available_kinds(labels: Tensor) -> tuple[str, ...]:
    """Return the kinds that the samples can fit: some need two degrees of freedom within classes."""
    degrees = len(labels) - len(labels.unique())
    return tuple(kind for kind in KINDS if degrees >= 2 or kind not in {"relevant", "whitened"})


def fit_view(kind: str, features: Tensor, labels: Tensor, num_classes: int) -> LinearView:
    """Fit one linear view to labelled samples.

    Args:
        kind: One of ``KINDS``.
        features: (n, dim) float32 of about unit scale.
        labels: (n,) int64 in [0, num_classes).
        num_classes: Number of classes.

    Returns:
        The view, scaled so that the samples have about unit mean square a feature. float32 buffers.

    Source: standardised and whitened views as in Snell et al. 2017 (cosine prototypes) after LDA's sphering.
    """
    dim = features.shape[1]
    shift = torch.zeros(dim, dtype=torch.float64)
    gain = torch.ones(dim, dtype=torch.float64)
    basis, coefficient = torch.zeros(dim, 0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    if kind != "raw":
        shift = features.mean(dim=0, dtype=torch.float64)
    if kind in {"standardised", "relevant", "robust"}:
        deviation = (features - shift.to(features.dtype)).square().mean(dim=0, dtype=torch.float64).sqrt()
        usable = deviation > 1e-6 * features.square().mean(dim=0, dtype=torch.float64).sqrt()  # else constant
        if kind == "robust":  # median and interquartile range, unless half of the values are one
            lower, shift, upper = _quartiles(features)
            spread = (upper - lower) / 1.349
            deviation = torch.where(spread > 0.1 * deviation, spread, deviation)
        gain = torch.where(usable, 1 / deviation.clamp_min(1e-30), 0.0)
        if kind == "relevant":
            gain *= _relevance(features, labels, num_classes)
    if kind == "whitened":
        gain, basis, coefficient = _whitening(features, labels, num_classes)
    view = LinearView(shift, gain, basis, coefficient, lift=LIFT if kind in LIFTED else 0.0)
    size = view(features[:CHUNK]).square().mean().sqrt().clamp_min(1e-30)
    view.gain /= size
    view.coefficient /= size
    return view


def _quartiles(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the quartiles (dim,) of each feature, of at most ``CHUNK`` rows spread over the data."""
    ordered = features[:: max(1, len(features) // CHUNK)].sort(dim=0).values.to(torch.float64)
    return tuple(ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))  # type: ignore[return-value]


def _relevance(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return for each feature (dim,) a factor in (0, 1): how much its class means differ, by the F statistic.

    Under no difference F is about 1; the excess e over it gives ``sqrt(e / (e + 5))``, a shrunken signal share.
    """
    means, counts = class_means(features, labels, num_classes)
    seen = int((counts > 0).sum())
    within = (features - means[labels]).square().sum(dim=0, dtype=torch.float64) / max(1, len(features) - seen)
    between = (counts[:, None] * (means - features.mean(dim=0)).square()).sum(dim=0, dtype=torch.float64)
    excess = (between / max(1, seen - 1) / within.clamp_min(1e-30) - 1).clamp_min(0.05)
    return (excess / (excess + 5)).sqrt()


def _whitening(x: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return gain (dim,), basis (dim, rank) and coefficient (rank,) of the whitened view."""
    means, counts = class_means(x, labels, num_classes)
    seen = counts > 0
    degrees = len(x) - int(seen.sum())
    shots = float(1 / (1 / counts[seen]).mean())
    dim = x.shape[1]
    covariance = shrink_covariance(x - means[labels], degrees)
    rank = len(covariance.variances)
    deviations = means[seen].to(torch.float64) - x.mean(dim=0, dtype=torch.float64)
    along = (deviations @ covariance.basis).square().mean(dim=0)  # (rank,)
    within, between = covariance.variances, along
    multiplicity = torch.ones_like(within)
    if rank < dim:  # one more entry stands for all directions off the basis
        off = (deviations.square().sum(dim=1).mean() - along.sum()).clamp_min(0) / (dim - rank)
        within = torch.cat([within, covariance.rest[None]])
        between = torch.cat([between, off[None]])
        multiplicity = torch.cat([multiplicity, multiplicity.new_tensor([dim - rank])])
    floor = within.max() * 1e-14
    gains = _discriminant_gains(within.clamp_min(floor.clamp_min(1e-30)), between, multiplicity, shots)
    rest = gains[rank] if rank < dim else gains.new_zeros(())
    return rest.expand(dim).clone(), covariance.basis, gains[:rank] - rest
