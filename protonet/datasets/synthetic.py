"""Sample synthetic data: class prototypes on a sphere, with noise from one of several families of distributions.

Every family starts from the same distribution and changes one thing about it: prototypes are uniform on the sphere of
radius 2.5, and rows are a prototype plus Gaussian noise of standard deviation 0.4 per feature. With the same seed every
family has the same prototypes, except that ``subclusters`` needs more of them. The sizes of training, validation and
test sets do not affect each other's samples. Comparisons of families and of sample sizes are therefore paired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protonet._validation import check_int
from protonet.errors import raise_input_error

SampleRows = Callable[[Tensor, torch.Generator], Tensor]  #: Maps labels (n,) to sampled features (n, dim) float32.


#: Norm of the prototypes, in all families.
RADIUS = 2.5


@dataclass(frozen=True)
class Split:
    """Training, validation and test samples of the same classes, with the covariance of the noise if it is known."""

    train_x: Tensor  #: (num_classes * n_train, dim) float32, rows shuffled.
    train_y: Tensor  #: (num_classes * n_train,) int64, in [0, num_classes).
    val_x: Tensor  #: (num_classes * n_val, dim) float32.
    val_y: Tensor  #: (num_classes * n_val,) int64.
    test_x: Tensor  #: (num_classes * n_test, dim) float32.
    test_y: Tensor  #: (num_classes * n_test,) int64, never wrong.
    num_classes: int  #: The number of classes.
    #: The true covariance of the noise (dim, dim) float64, if rows are a prototype plus Gaussian noise with the same
    #: covariance in all classes; otherwise None.
    noise_covariance: Tensor | None = None
    #: The norm of the prototypes; meaningless if ``noise_covariance`` is None.
    radius: float = RADIUS


@dataclass(frozen=True)
class Population:
    """The distribution of a synthetic data set, from which the training, validation and test samples are drawn."""

    sample: SampleRows  #: Samples one row of features for each label, from the distribution of the label's class.
    noise_covariance: Tensor | None = None  #: The true covariance of the noise, as in `Split`.
    wrong_label_fraction: float = 0.0
    """The fraction of training and validation labels to replace by wrong ones, in [0, 1]."""


#: Standard deviation of the noise per feature, in all families.
NOISE_STD = 0.4


def isotropic(num_classes: int, dim: int, generator: torch.Generator) -> Population:
    """Make the basic distribution: rows are a prototype of norm 2.5 plus Gaussian noise of 0.4 per feature."""
    prototypes = _sample_prototypes(num_classes, dim, generator)

    def sample(labels: Tensor, generator: torch.Generator) -> Tensor:
        return prototypes[labels] + NOISE_STD * torch.randn(len(labels), dim, generator=generator)

    return Population(sample, noise_covariance=NOISE_STD**2 * torch.eye(dim, dtype=torch.float64))


def correlated(num_classes: int, dim: int, generator: torch.Generator) -> Population:
    """Make a distribution with correlated Gaussian noise.

    The covariance of the noise has eigenvalues proportional to k^-1.5 in a random basis; their mean is 20 * 0.4^2.
    """
    # ``correlated``: mean variance of the noise, in units of noise**2.
    correlated_variance = 20.0
    # ``correlated``: the k-th eigenvalue is proportional to k**-correlated_eigenvalue_exponent.
    correlated_eigenvalue_exponent = 1.5
    spectrum = torch.arange(1, dim + 1, dtype=torch.float64) ** -correlated_eigenvalue_exponent  # (dim,)
    variance = correlated_variance * NOISE_STD**2
    return _anisotropic(num_classes, dim, generator, variance * spectrum / spectrum.mean())


def nuisance(num_classes: int, dim: int, generator: torch.Generator) -> Population:
    """Make a distribution whose noise has 100 times the variance along 32 random orthogonal directions.

    Along all other directions, its standard deviation is 0.4. With fewer than 64 features, half of all directions have
    the larger variance.
    """
    # ``nuisance``: number of directions with more noise, or half the number of features if that is less.
    n_nuisance_directions = 32
    # ``nuisance``: variance of the noise along these directions, in noise**2.
    nuisance_variance = 100.0
    spectrum = torch.full((dim,), NOISE_STD**2, dtype=torch.float64)
    spectrum[: min(n_nuisance_directions, dim // 2)] *= nuisance_variance
    return _anisotropic(num_classes, dim, generator, spectrum)


def subclusters(num_classes: int, dim: int, generator: torch.Generator) -> Population:
    """Make a distribution with 3 prototypes per class; each row is a random prototype of its class plus noise."""
    # ``subclusters``: number of sub-clusters per class.
    n_subclusters_per_class = 3
    count = n_subclusters_per_class
    prototypes = _sample_prototypes(num_classes * count, dim, generator)

    def sample(labels: Tensor, generator: torch.Generator) -> Tensor:
        subcluster = torch.randint(count, labels.shape, generator=generator)  # (n,)
        noise = torch.randn(len(labels), dim, generator=generator)
        return prototypes[labels * count + subcluster] + NOISE_STD * noise

    return Population(sample)


def warped(num_classes: int, dim: int, generator: torch.Generator) -> Population:
    """Make a distribution of isotropic rows x that are mapped by a fixed random network: ``tanh(3 x A + b) B``.

    A and B are (dim, dim) with entries from N(0, 1/dim), b is standard normal. At the default size, the inputs of the
    hidden units have standard deviation 1.6, and an affine map of x explains nine tenths of the output's variance. The
    nearest class mean by cosine has an accuracy of 98.7 % on the rows x, 52 % on the mapped rows, and 76 % on the
    mapped rows after Ledoit-Wolf whitening.
    """
    # ``warped``: factor on the inputs of the random network's hidden units.
    warp_scale = 3.0
    population = isotropic(num_classes, dim, generator)
    inner = torch.randn(dim, dim, generator=generator) / dim**0.5
    outer = torch.randn(dim, dim, generator=generator) / dim**0.5
    bias = torch.randn(dim, generator=generator)

    def sample(labels: Tensor, generator: torch.Generator) -> Tensor:
        warped = warp_scale * population.sample(labels, generator) @ inner + bias
        return torch.tanh(warped).mm(outer)

    return Population(sample)


def heavy_tails(num_classes: int, dim: int, generator: torch.Generator) -> Population:
    """Make a distribution with heavy-tailed noise: per feature, 0.4 times Student's t with 3 degrees of freedom."""
    # ``heavy_tails``: degrees of freedom of Student's t distribution.
    degrees_of_freedom = 3
    freedom = degrees_of_freedom
    prototypes = _sample_prototypes(num_classes, dim, generator)

    def sample(labels: Tensor, generator: torch.Generator) -> Tensor:
        normal = torch.randn(len(labels), dim, generator=generator)
        squares = torch.zeros_like(normal)
        for _ in range(freedom):
            squares += torch.randn(len(labels), dim, generator=generator) ** 2
        return prototypes[labels] + NOISE_STD * normal / (squares / freedom).sqrt()

    return Population(sample)


def class_noise(num_classes: int, dim: int, generator: torch.Generator) -> Population:
    """Make a distribution with isotropic noise whose standard deviation differs by class: log-uniform in [0.2, 0.8]."""
    prototypes = _sample_prototypes(num_classes, dim, generator)
    octaves = 2 * torch.rand(num_classes, 1, generator=generator) - 1  # (num_classes, 1), in [-1, 1)
    levels = NOISE_STD * 2**octaves  # (num_classes, 1)

    def sample(labels: Tensor, generator: torch.Generator) -> Tensor:
        return prototypes[labels] + levels[labels] * torch.randn(len(labels), dim, generator=generator)

    return Population(sample)


#: ``wrong_labels``: fraction of the training and validation labels that are wrong.
WRONG_LABEL_FRACTION = 0.1


def wrong_labels(num_classes: int, dim: int, generator: torch.Generator) -> Population:
    """Make an isotropic distribution, with a wrong class for 10 % of the training and validation labels."""
    sample = isotropic(num_classes, dim, generator).sample
    return Population(sample, wrong_label_fraction=WRONG_LABEL_FRACTION)


FAMILIES: dict[str, Callable[[int, int, torch.Generator], Population]] = {
    f.__name__: f
    for f in (isotropic, correlated, nuisance, subclusters, warped, heavy_tails, class_noise, wrong_labels)
}


def sample_family(
    name: str, *, seed: int, n_train: int = 16, n_val: int = 4, n_test: int = 8, num_classes: int = 128, dim: int = 384
) -> Split:
    """Sample a synthetic data set: training, validation and test rows of a random distribution of a family.

    The global random state is neither used nor changed.

    Args:
        name: A key of ``FAMILIES``.
        seed: A whole number >= 0. The distribution, and the training, validation and test rows, have separate
            generators, all seeded from ``seed``.
        n_train: Training samples per class, >= 1.
        n_val: Validation samples per class, >= 0.
        n_test: Test samples per class, >= 1.
        num_classes: The number of classes, >= 2.
        dim: The number of features, >= 2.

    Returns:
        The training, validation and test rows with their labels.

    Raises:
        InputError: The family is unknown, or a count is out of range.
        InputTypeError: A count or the seed is not a number.

    Example:
        >>> split = sample_family("correlated", seed=0, n_train=4, num_classes=10, dim=16)
        >>> tuple(split.train_x.shape), tuple(split.test_y.shape)
        ((40, 16), (80,))
    """
    if name not in FAMILIES:
        raise_input_error("name", f"be one of {', '.join(FAMILIES)}", repr(name), "Pick a listed family.")
    seed = check_int("seed", seed, low=0)
    n_train = check_int("n_train", n_train, low=1)
    n_val = check_int("n_val", n_val, low=0)
    n_test = check_int("n_test", n_test, low=1)
    num_classes = check_int("num_classes", num_classes, low=2)
    dim = check_int("dim", dim, low=2)

    seeds = [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(seed).spawn(4)]
    population = FAMILIES[name](num_classes, dim, torch.Generator().manual_seed(seeds[0]))
    wrong = population.wrong_label_fraction
    parts: list[Tensor] = []
    for n, fraction, split_seed in zip((n_train, n_val, n_test), (wrong, wrong, 0.0), seeds[1:], strict=True):
        generator = torch.Generator().manual_seed(split_seed)
        labels = torch.randperm(num_classes * n, generator=generator) % num_classes  # (num_classes * n,)
        parts += [population.sample(labels, generator), labels]
        n_wrong = round(fraction * len(labels))
        shift = torch.randint(1, num_classes, (n_wrong,), generator=generator)
        labels[:n_wrong] = (labels[:n_wrong] + shift) % num_classes  # the order is random already
    train_x, train_y, val_x, val_y, test_x, test_y = parts
    return Split(train_x, train_y, val_x, val_y, test_x, test_y, num_classes, population.noise_covariance)


def _sample_prototypes(n: int, dim: int, generator: torch.Generator) -> Tensor:
    """Sample n prototypes (n, dim) uniformly on the sphere of radius 2.5."""
    return RADIUS * torch.nn.functional.normalize(torch.randn(n, dim, generator=generator), dim=1)


def _anisotropic(num_classes: int, dim: int, generator: torch.Generator, spectrum: Tensor) -> Population:
    """Make a distribution whose noise covariance has eigenvalues ``spectrum`` (dim,) in a random orthonormal basis."""
    prototypes = _sample_prototypes(num_classes, dim, generator)
    basis: Tensor = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=generator)).Q  # (dim, dim)
    root = (basis * spectrum.sqrt()).T.float()  # (dim, dim), root.T @ root is the covariance

    def sample(labels: Tensor, generator: torch.Generator) -> Tensor:
        return prototypes[labels] + torch.randn(len(labels), dim, generator=generator) @ root

    return Population(sample, noise_covariance=(basis * spectrum) @ basis.T)
