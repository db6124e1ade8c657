"""Class names as rows: their words, their weight, and that they are never evaluated."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor

from protonet.embeddings.encoder import EncoderRecord, PretrainedEncoder
from protonet.embeddings.loading import load_encoder
from protonet.fit.cross_validation import balanced_class_weights, cross_validate, held_out_indices, restore_row_counts
from protonet.fit.names import (
    CLASS_NAMES_ONLY_SEARCH,
    DEFAULT_NAME_WEIGHT,
    NAME_INVERSE_TEMPERATURE,
    NAME_PRIOR_EVIDENCE,
    NAME_WEIGHTS,
    choose_name_weight,
    classify_by_names,
    embed_class_names,
    split_name_into_words,
)
from protonet.fit.solver import Solution, fit_solution
from protonet.fit.training_set import ClassNameRows
from protonet.selection.folds import split_folds
from protonet.selection.scoring import LOGIT_PRIOR_STD
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.ordered import Numeric
from protonet.tables.columns.picture import Picture
from protonet.tables.columns.text import EmbeddedText, Text
from tests.strategies import PLAIN, accuracy, blobs, seeds

X, Y = blobs(0, classes=5, rows=4, dim=12, noise=0.6)
MEANS = torch.stack([X[label == Y].mean(dim=0) for label in range(5)])
NEAR = MEANS + 0.3 * torch.randn(MEANS.shape, generator=torch.Generator().manual_seed(1))


def test_words_are_extracted_from_class_names() -> None:
    cases: dict[str | int, str] = {"card_arrival": "card arrival", "cardArrival": "card Arrival"}
    cases |= {"Card arrival?": "Card arrival", "visa-or/mastercard": "visa or mastercard", "HTTPError": "HTTPError"}
    cases |= {"topic: lost card 2": "topic lost card 2", "carte_débitée": "carte débitée"}
    cases |= {"caféAuLait": "café Au Lait", "straßeÖffnen": "straße Öffnen"}
    cases |= {"卡片": "卡片", "카드_분실": "카드 분실", "บัตรหาย": "บัตรหาย"}
    cases |= dict.fromkeys(["c1", "A", 7, "7", "class 3", "class_3", "Label", "x2y2z2z", "", "a b c", "?!", "片"], "")
    cases |= dict.fromkeys(["TRUE", "False", "yes", "off"], "")
    for name, words in cases.items():
        assert split_name_into_words(name) == words, name
        if isinstance(name, str):
            decomposed = unicodedata.normalize("NFD", name)  # as some file systems write it
            assert split_name_into_words(decomposed) == words, name


@pytest.mark.usefixtures("embedding_cache")
def test_class_names_are_embedded_like_texts() -> None:
    pytest.importorskip("wordllama", reason="it brings vectors of words")
    texts = np.array(["my card is lost", "the card came", "where is my money", "money back", "a dog", "dogs"], object)
    indices = np.array([1.0, 2, 3, 4, 5, np.nan])
    column = EmbeddedText.fit(texts, load_encoder("words"), words=Text.fit(texts[:0]))
    encoding = Encoding((Numeric.fit(indices), column))
    x, labels = torch.from_numpy(encoding.encode([indices, texts])), torch.tensor([0, 0, 1, 1, 2, 2])
    names = embed_class_names(encoding, ["card", "money_back", "c3"], x, labels, ["", "refunds", ""])
    assert names is not None
    assert names.labels.tolist() == [0, 1]
    assert names.sample_count in NAME_WEIGHTS
    embedded = column.encode(np.array(["card", "money back: refunds"], object))
    of_texts = list(encoding.feature_range(1))
    np.testing.assert_allclose(names.features[:, of_texts], embedded - embedded.mean(axis=0), atol=1e-6)
    others = [index for index in range(x.shape[1]) if index not in of_texts]
    for row in (0, 1):  # other features of a name are the means of its class
        torch.testing.assert_close(names.features[row, others], x[labels == row][:, others].mean(dim=0))
    alone = embed_class_names(encoding, ["card", "money"], x[:0], labels[:0])
    assert alone is not None
    assert alone.sample_count == DEFAULT_NAME_WEIGHT
    assert not alone.features[:, others].any()
    for classes in (["c1", "c2", "c3"], ["card", "c2", "c3"], ["card", "Card?", "card"]):
        result = embed_class_names(encoding, [name.lower() for name in classes], x, labels)
        assert result is None
    assert embed_class_names(Encoding((Numeric.fit(indices),)), ["card", "money"], x[:, :1], labels) is None
    assert embed_class_names(None, ["card", "money"], x, labels) is None


def test_names_count_only_if_rows_do_not_contradict_them() -> None:
    known = torch.arange(5)
    assert choose_name_weight(X, Y, NEAR, known, 5) > 0
    for step in range(1, 5):  # of other classes
        assert choose_name_weight(X, Y, NEAR.roll(step, dims=0), known, 5) == 0
    first = torch.stack([X[label == Y][0] for label in range(5)])
    assert choose_name_weight(first, known, NEAR, known, 5) == DEFAULT_NAME_WEIGHT  # no class has two rows
    assert choose_name_weight(first, known, NEAR.roll(1, dims=0), known, 5) == 0
    assert choose_name_weight(X[:0], Y[:0], NEAR, known, 5) == DEFAULT_NAME_WEIGHT
    some = Y < 2  # those named, the others' rows are no evidence
    assert choose_name_weight(X[some], Y[some], NEAR[2:], known[2:], 5) in NAME_WEIGHTS
    assert choose_name_weight(10 * NEAR[Y[some]], Y[some], NEAR[:2], known[:2], 5) <= 2  # rows that need no name
    assert choose_name_weight(10 * NEAR[Y[some]], Y[some], NEAR, known, 5) > 0  # but three classes have nothing else
    mixed = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 1, 4, 0, 2])
    shuffled = choose_name_weight(X[mixed], Y[mixed], NEAR[order], known[order], 5)
    assert shuffled == choose_name_weight(X, Y, NEAR, known, 5)


def leave_one_out_loss(x: np.ndarray, labels: np.ndarray, names: np.ndarray, weight: float) -> float:
    """Compute the leave-one-out log-loss of cosines to sums of rows and names at their best temperature."""
    x, names = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (x, names))
    cosines = np.empty((len(x), len(names)))
    for row in range(len(x)):
        for label in range(len(names)):
            vectors_of_class = [x[other] for other in range(len(x)) if other != row and labels[other] == label]
            total = np.sum([*vectors_of_class, weight * names[label]], axis=0)
            cosines[row, label] = x[row] @ total / np.linalg.norm(total)
    ridge = cosines.var(axis=1).mean() / (LOGIT_PRIOR_STD**2 * len(x))

    def loss(factor: float, ridge: float = 0) -> float:
        logits = factor * cosines
        losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(x)), labels]
        return float(losses.mean() + ridge * factor**2 / 2)

    return loss(minimize_scalar(lambda vectors: loss(vectors, ridge), bounds=(0, 200), method="bounded").x)


def test_the_weight_of_names_has_the_smallest_leave_one_out_loss_and_cost() -> None:
    chosen = set()
    for seed, noise in enumerate((0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 2.0, 3.0)):
        x, labels = blobs(seed, classes=4, rows=8, dim=6, noise=1.0)
        first = torch.cat([(labels == label).nonzero()[:4, 0] for label in range(4)]).sort().values
        other = torch.ones_like(labels, dtype=torch.bool).index_fill_(0, first, 0)
        names = torch.stack([x[other & (labels == label)].mean(dim=0) for label in range(4)])
        names += noise * torch.randn(names.shape, generator=torch.Generator().manual_seed(seed))
        x, labels = x[first], labels[first]
        weight = choose_name_weight(x, labels, names, torch.arange(4), 4)
        arrays = x.numpy(), labels.numpy(), names.numpy()
        costs = [0 if item == 2 else abs(math.log2((item or 0.5) / 2)) for item in NAME_WEIGHTS]
        losses = [
            len(x) * leave_one_out_loss(*arrays, item) + cost for item, cost in zip(NAME_WEIGHTS, costs, strict=True)
        ]
        cosines = torch.nn.functional.normalize(x, dim=1) @ torch.nn.functional.normalize(names, dim=1).T
        log_p = (NAME_INVERSE_TEMPERATURE * cosines).log_softmax(dim=1)
        likely = log_p.gather(1, labels[:, None]).sum() + len(x) * math.log(4) + NAME_PRIOR_EVIDENCE >= 0
        assert weight == (NAME_WEIGHTS[int(np.argmin(losses))] if likely else 0)
        chosen.add(weight)
    assert len(chosen) > 1


@given(seed=seeds, classes=st.integers(1, 4), grouped=st.booleans(), n=st.integers(0, 30))
def test_names_are_fitted_to_in_every_fold_and_never_held_out(seed: int, classes: int, grouped: bool, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n + classes,), generator=generator)
    described = torch.randperm(n + classes, generator=generator) >= n
    groups = torch.randint(7, (n + classes,), generator=generator) if grouped else None
    split = split_folds(labels, classes, partition=seed, groups=groups, is_class_name=described)
    row_groups = None if groups is None else groups[~described]
    alone = split_folds(labels[~described], classes, partition=seed, groups=row_groups)
    samples, names = (item.nonzero().flatten().tolist() for item in (~described, described))
    assert len(split) == len(alone)
    for fold, other in zip(split, alone, strict=True):
        assert fold.held_out.tolist() == [samples[row] for row in other.held_out.tolist()]
        assert fold.train.tolist() == sorted([*(samples[row] for row in other.train.tolist()), *names])


def solve(names: ClassNameRows | None, x: Tensor = X, y: Tensor = Y, groups: Tensor | None = None) -> Solution:
    return fit_solution([(x, y)], metadata={"num_classes": 6}, search=PLAIN, groups=groups, names=names)


def test_names_are_part_of_prototypes_and_indices_are_those_of_the_samples() -> None:
    names = ClassNameRows(torch.cat([NEAR, -NEAR[:1]]), torch.arange(6), 2.0)  # of the last class there is no sample
    groups = torch.arange(len(X)) // 2 * 3
    for used_groups in (None, groups):
        solution = solve(names, groups=used_groups)
        problem, network = solution.training_set, solution.network
        assert network.counts.tolist() == [6, 6, 6, 6, 6, 2]
        assert names.count_class_samples(6).tolist() == [2] * 6
        assert network(-NEAR[:1]).argmax() == 5
        assert len(problem.rows.labels) == len(X) + 6
        assert len(problem.row_indices) == len(X)
        torch.testing.assert_close(problem.original_features(problem.row_indices), X)
        torch.testing.assert_close(problem.rows.labels[problem.row_indices], Y)
        assert problem.rows.is_class_name is not None
        assert not problem.rows.is_class_name[problem.row_indices].any()
        assert int(problem.rows.is_class_name.sum()) == 6
        cv = cross_validate(solution)
        indices = held_out_indices(problem)
        assert sorted(indices.tolist()) == list(range(len(X)))
        torch.testing.assert_close(cv.features[indices], X)
        assert cv.weights.tolist() == [1] * len(X)
        for index, fold in enumerate(cv.fold_models):
            left = torch.bincount(cv.labels[cv.fold_index == index], minlength=6)
            assert fold.counts.tolist() == (network.counts - left).tolist()
        if used_groups is not None:
            assert solution.merged_groups is not None
            assert len(solution.merged_groups) == len(used_groups.unique())
            assert problem.rows.groups is not None
            numbered = solution.merged_groups[used_groups.unique(return_inverse=True)[1]]
            torch.testing.assert_close(problem.rows.groups[problem.row_indices], numbered)


def test_a_name_that_equals_a_sample_is_not_merged_with_it() -> None:
    names = ClassNameRows(X[[0, 0]], torch.tensor([int(Y[0]), int(Y[0] + 1) % 5]), 3.0)
    solution = solve(names, torch.cat([X, X[:1]]), torch.cat([Y, Y[:1]]))
    rows = solution.training_set.rows
    assert rows.is_class_name is not None
    assert len(rows.labels) == len(X) + 2  # the sample that came twice is one
    assert int(rows.is_class_name.sum()) == 2
    expected = torch.bincount(torch.cat([Y, Y[:1]]), minlength=6) + names.count_class_samples(6)
    assert solution.network.counts.tolist() == expected.tolist()
    cv = cross_validate(solution)
    assert float(cv.weights.sum()) == pytest.approx(len(X) + 1)


def test_the_order_of_rows_and_names_has_no_effect() -> None:
    names = ClassNameRows(NEAR, torch.arange(5), 2.0)
    mixed, order = (torch.randperm(n, generator=torch.Generator().manual_seed(n)) for n in (len(X), 5))
    one, other = solve(names), solve(ClassNameRows(NEAR[order], order, 2.0), X[mixed], Y[mixed])
    assert torch.equal(one.network(X), other.network(X))


def test_names_alone_are_the_prototypes() -> None:
    names = ClassNameRows(NEAR, torch.arange(5), DEFAULT_NAME_WEIGHT)
    solution = fit_solution(None, metadata={"num_classes": 5}, search=CLASS_NAMES_ONLY_SEARCH, names=names)
    assert solution.network(NEAR).argmax(dim=1).tolist() == list(range(5))
    assert accuracy(solution.network(X), Y) > 0.8
    assert solution.network.counts.tolist() == [DEFAULT_NAME_WEIGHT] * 5
    assert not len(cross_validate(solution).labels)
    assert not len(solution.training_set.row_indices)


def test_balanced_classes_keep_the_counts_of_their_names() -> None:
    few = (Y > 0) | (torch.arange(len(Y)) < 10)
    x, y, names = X[few], Y[few], ClassNameRows(torch.cat([NEAR, -NEAR[:1]]), torch.arange(6), 2.0)
    weights = balanced_class_weights(y)
    given_weights = {"metadata": {"num_classes": 6}, "search": PLAIN, "weights": weights, "names": names}
    solution = fit_solution([(x, y)], **given_weights)  # type: ignore[arg-type]
    logits = solution.network(x)
    cv = restore_row_counts(cross_validate(solution), y, weights, names.count_class_samples(6))
    rows = torch.bincount(y, minlength=6)
    assert cv.network.counts.tolist() == (rows + 2).tolist()
    torch.testing.assert_close(cv.network(x), logits)
    assert cv.network(-NEAR[:1]).argmax() == 5
    for index, fold in enumerate(cv.fold_models):
        left = torch.bincount(cv.labels[cv.fold_index == index], minlength=6)
        assert fold.counts.tolist() == (rows + 2 - left).tolist()


def test_a_joint_network_embeds_the_class_names_of_pictures(tmp_path: Path) -> None:
    """The joint network embeds a picture as its mean colour, and a name as the colour that it names."""
    pil = pytest.importorskip("PIL.Image", reason="the extra pictures reads them")
    colours = {"red": (1.0, 0.0, 0.0), "green": (0.0, 1.0, 0.0), "deep blue": (0.0, 0.0, 1.0)}
    rng = np.random.default_rng(0)
    paths, labels = [], []
    for index in range(24):
        name = list(colours)[index % 3]
        path = tmp_path / f"{index}.png"
        pixels = rng.normal(60, 40, (20, 20, 3)) + 140 * np.array(colours[name])
        pil.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
        paths.append(str(path))
        labels.append(index % 3)

    def read(items: Sequence[Path]) -> np.ndarray:
        return np.stack([np.asarray(pil.open(path), np.float32).mean(axis=(0, 1)) for path in items])

    def join(texts: Sequence[str]) -> np.ndarray:
        return np.array([colours[text] for text in texts], np.float32)

    network = PretrainedEncoder(EncoderRecord("colours", "picture", 3, "", ""), read, embed_texts=join)
    cells = np.array(paths, object)
    column = Picture.fit(cells, network)
    encoding = Encoding((column,))
    x = torch.from_numpy(encoding.encode([cells]))
    by_name = classify_by_names(encoding, list(colours), x)
    assert by_name is not None
    assert by_name.tolist() == labels
    y = torch.tensor(labels)
    names = embed_class_names(encoding, list(colours), x, y)
    assert names is not None
    assert names.sample_count > 0
    features = names.features[:, column.embedding_width :]  # our own features of a class are those of its rows
    means = [x[y == k][:, column.embedding_width :].mean(dim=0) for k in range(3)]
    torch.testing.assert_close(features, torch.stack(means))
    plain = Encoding((Picture.fit(cells, replace(network, embed_texts=None)),))
    assert embed_class_names(plain, list(colours), x, y) is None
