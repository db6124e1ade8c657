"""Synthetic tasks from families of relations between features and classes.

A family samples features (n, dim) and classes (n,). `sample_task` samples a family, and corrupts its table as real
tables are: with uninformative, duplicated, transformed or rounded columns, and wrong labels.

Source: the idea is that of Hollmann et al., "TabPFN" (2023), sec. 4.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SampledRows = tuple[np.ndarray, np.ndarray]  #: Features (n, dim) and classes (n,).
Families = tuple[Callable[[int, np.random.Generator], SampledRows], ...]
ElementwiseFunction = Callable[[np.ndarray], np.ndarray]
MAX_CLASSES = 10
ACTIVATIONS: tuple[ElementwiseFunction, ...] = (np.tanh, np.sin, np.abs, lambda z: np.maximum(z, 0), lambda z: z)
TRANSFORMATIONS: tuple[ElementwiseFunction, ...] = (np.exp, lambda z: np.sign(z) * z**2, np.tanh)


def _sample_dim(rng: np.random.Generator, high: int) -> int:
    """Sample a number of features from 2 to ``high``, log-uniformly."""
    return round(float(np.exp(rng.uniform(np.log(2), np.log(high)))))


def _sample_class_count(rng: np.random.Generator) -> int:
    """Sample a number of classes, most often two."""
    return min(MAX_CLASSES, 2 + int(rng.geometric(0.35)) - 1)


def _bin_scores(scores: np.ndarray, n_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Bin scores (n,) into classes (n,) at random thresholds that leave rows in every class."""
    probabilities = rng.dirichlet(np.full(n_classes, 3.0))
    return np.searchsorted(np.quantile(scores, probabilities.cumsum()[:-1]), scores)


def draw_clusters(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample Gaussian clusters, one or a few per class, with few informative and many noise directions."""
    dim, n_classes = _sample_dim(rng, 60), _sample_class_count(rng)
    per_class = int(rng.choice([1, 1, 1, 2, 3]))
    rank = rng.integers(1, dim + 1)
    basis = rng.normal(size=(dim, rank)) / np.sqrt(rank)
    centres = rng.normal(size=(n_classes * per_class, rank)) @ basis.T * rng.uniform(0.5, 3)
    cluster = rng.integers(len(centres), size=n)
    noise = rng.normal(size=(n, dim))
    if rng.random() < 0.5:  # correlated noise, of one covariance or one for each class
        mixing = rng.normal(size=(n_classes if rng.random() < 0.4 else 1, dim, dim)) / np.sqrt(dim)
        mixing *= np.exp(rng.normal(size=(len(mixing), dim, 1)) * rng.uniform(0, 1.5))
        noise = np.einsum("nd,ned->ne", noise, mixing[(cluster % n_classes) % len(mixing)])
    if rng.random() < 0.25:
        noise *= rng.standard_t(3, size=(n, 1))
    return centres[cluster] + noise, cluster % n_classes


def draw_causes(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample a structural causal model: nodes of a random network, one of them binned into classes."""
    width, depth = int(rng.integers(4, 30)), int(rng.integers(1, 5))
    nodes, layer = [], rng.normal(size=(n, int(rng.integers(2, 8))))
    for _ in range(depth):
        weights = rng.normal(size=(layer.shape[1], width)) * (rng.random((layer.shape[1], width)) < rng.uniform(0.2, 1))
        activate = ACTIVATIONS[int(rng.integers(len(ACTIVATIONS)))]
        layer = activate(layer @ weights + rng.normal(size=width))
        layer = layer + rng.normal(size=(n, width)) * rng.uniform(0, 0.3)
        nodes.append(layer)
    every = np.concatenate(nodes, axis=1)
    target = int(rng.integers(every.shape[1]))
    dim = min(every.shape[1] - 1, _sample_dim(rng, 40))
    others = rng.permutation(np.delete(np.arange(every.shape[1]), target))[:dim]
    return every[:, others], _bin_scores(every[:, target], _sample_class_count(rng), rng)


def draw_tree(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample classes in the boxes of a random tree on a few columns."""
    dim, n_classes = _sample_dim(rng, 30), _sample_class_count(rng)
    x = rng.normal(size=(n, dim)) if rng.random() < 0.5 else rng.random((n, dim))
    used = rng.permutation(dim)[: int(rng.integers(1, min(dim, 5) + 1))]
    box = np.zeros(n, int)
    for _ in range(int(rng.integers(1, 6))):
        column = x[:, rng.choice(used)]
        box = 2 * box + (column > np.quantile(column, rng.uniform(0.2, 0.8)))
    names, box = np.unique(box, return_inverse=True)
    return x, rng.permutation(np.arange(len(names)) % n_classes)[box]


def draw_smooth(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample classes from smooth random functions of a few directions: Gaussian processes by random features."""
    dim, n_classes = _sample_dim(rng, 30), _sample_class_count(rng)
    x = rng.normal(size=(n, dim))
    inner = x @ rng.normal(size=(dim, int(rng.integers(1, min(dim, 6) + 1)))) / np.sqrt(dim)
    frequencies = rng.normal(size=(inner.shape[1], 100)) * rng.uniform(0.3, 2.5)
    waves = np.cos(inner @ frequencies + rng.uniform(0, 2 * np.pi, 100))
    return x, (waves @ rng.normal(size=(100, n_classes))).argmax(axis=1)


def draw_embedding(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample embeddings: a common offset, a falling spectrum, class means along any direction, sometimes ReLU."""
    dim, n_classes = int(rng.choice([32, 64, 128, 256])), int(rng.integers(2, MAX_CLASSES + 1))
    spectrum = np.arange(1, dim + 1) ** -rng.uniform(0, 1.2)
    spectrum *= np.sqrt(dim / (spectrum**2).sum())
    turn = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    means = rng.normal(size=(n_classes, dim)) * spectrum ** rng.uniform(0, 1) * rng.uniform(0.2, 1.2)
    y = rng.integers(n_classes, size=n)
    x = (means[y] + rng.normal(size=(n, dim)) * spectrum) @ turn + rng.normal(size=dim) * rng.choice([0, 0.5, 2])
    return (np.maximum(x, 0) if rng.random() < 0.3 else x), y


def draw_signals(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample series of one template per class, shifted, stretched in height and noisy; or coloured noise."""
    length, n_classes = int(rng.integers(16, 120)), _sample_class_count(rng)
    y = rng.integers(n_classes, size=n)
    smooth = np.exp(-0.5 * (np.arange(-12, 13) / rng.uniform(1, 6)) ** 2)
    if rng.random() < 0.3:
        colour = rng.uniform(0, 0.98, size=n_classes)[y, None]
        x = rng.normal(size=(n, length))
        for t in range(1, length):
            x[:, t] += colour[:, 0] * x[:, t - 1]
        return x, y
    long = rng.normal(size=(n_classes, length + 64))
    templates = np.stack([np.convolve(row, smooth, "same") for row in long])
    templates /= templates.std(axis=1, keepdims=True)
    start = rng.integers(0, 1 + int(rng.choice([0, 3, 10, 30])), size=n)[:, None]
    x = templates[y[:, None], start + np.arange(length)] * np.exp(rng.normal(size=(n, 1)) * rng.uniform(0, 0.5))
    return x + rng.normal(size=(n, 1)) * rng.uniform(0, 1) + rng.normal(size=x.shape) * rng.uniform(0.1, 2), y


def draw_pictures(n: int, rng: np.random.Generator) -> SampledRows:
    """Sample images of one smooth template per class, shifted by a few pixels, with noise."""
    size, n_classes, reach = int(rng.integers(6, 15)), int(rng.integers(2, MAX_CLASSES + 1)), int(rng.integers(0, 4))
    y = rng.integers(n_classes, size=n)
    kernel = np.exp(-0.5 * (np.arange(-4, 5) / rng.uniform(0.7, 2)) ** 2)
    templates = rng.normal(size=(n_classes, size + 2 * reach, size + 2 * reach))
    for axis in (1, 2):
        templates = np.apply_along_axis(np.convolve, axis, templates, kernel, "same")
    templates = np.maximum(templates / templates.std(), 0) if rng.random() < 0.6 else templates / templates.std()
    down, right = rng.integers(0, 2 * reach + 1, size=(2, n, 1, 1))
    rows, columns = np.mgrid[:size, :size]
    x = templates[y[:, None, None], rows + down, columns + right] + rng.normal(size=(n, size, size)) * rng.uniform(0, 1)
    return x.reshape(n, -1), y


TABULAR_FAMILIES: Families = (draw_clusters, draw_causes, draw_tree, draw_smooth)
FAMILIES: Families = (*TABULAR_FAMILIES, draw_embedding, draw_signals, draw_pictures)


def corrupt(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> SampledRows:
    """Corrupt features and classes as in practice: uninformative, duplicated, transformed or rounded columns."""
    n, dim = x.shape
    if rng.random() < 0.3:
        x = np.concatenate([x, rng.normal(size=(n, int(rng.integers(1, dim + 1))))], axis=1)
    if rng.random() < 0.2:
        x = np.concatenate([x, x[:, rng.integers(dim, size=int(rng.integers(1, dim + 1)))]], axis=1)
    x = x[:, rng.permutation(x.shape[1])]
    deviation = x.std(axis=0) + 1e-9
    x = (x - x.mean(axis=0)) / deviation
    for column in np.flatnonzero(rng.random(x.shape[1]) < rng.choice([0, 0.3])):
        x[:, column] = TRANSFORMATIONS[int(rng.integers(len(TRANSFORMATIONS)))](x[:, column])
    for column in np.flatnonzero(rng.random(x.shape[1]) < rng.choice([0, 0.5])):
        x[:, column] = np.round(x[:, column] * rng.choice([0.7, 2, 10]))
    if rng.random() < 0.4:  # units of their own, far from 0
        x = x * np.exp(rng.normal(size=x.shape[1]) * rng.uniform(0, 3))
    if rng.random() < 0.4:
        x = x + np.abs(x).max(axis=0) * rng.choice([1, 3, 10])
    wrong = rng.random(n) < rng.choice([0, 0, 0.05, 0.15])
    return x, np.where(wrong, rng.permutation(y), y)


def sample_task(n: int, rng: np.random.Generator) -> tuple[str, np.ndarray, np.ndarray]:
    """Sample a task of a random family: the name of the family, features (n, dim) and classes (n,)."""
    family = FAMILIES[int(rng.integers(len(FAMILIES)))]
    x, y = family(n, rng)
    if family in TABULAR_FAMILIES:
        x, y = corrupt(x, y, rng)
    return family.__name__.removeprefix("draw_"), x, y
