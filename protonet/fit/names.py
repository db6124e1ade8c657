"""Class names as data: a name is embedded like the rows, and counts as some samples of its class.

The network stays one of prototypes: names are part of the sums and counts that these are means of, so that samples that
come later fade them out. See docs/decisions/names.md.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.fit.search import RAW, Search
from protonet.fit.training_set import ClassNameRows
from protonet.losses import class_means
from protonet.selection.scoring import fit_temperature
from protonet.tables.columns.encoding import Encoding
from protonet.views.linear import LinearFamily


@dataclass(frozen=True)
class NameRules:
    """How much a name counts; set on the developing half of the sets of docs/decisions/names.md."""

    scale: float = 10.0  #: Factor from cosines of rows and names to logits, to check whether names fit their rows.
    prior: float = 1.0  #: Nats that speak for names before any row does: words are rarely without meaning.
    weight: float = 2.0  #: Samples that a name counts as, where no class has two rows.
    weights: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0, 8.0)  #: The same, to choose from on rows left out.
    sharper: float = 12.0  #: If there are only names, logits are multiplied with 1 and this over the classes.
    least: int = 3  #: Letters of a word that says something.
    shared: float = 0.5  #: A word of more than this share of the names does not distinguish them.


NAMES = NameRules()
#: Words that say what a class is, and nothing of this one.
EMPTY = {
    "class",
    "label",
    "category",
    "type",
    "group",
    "cluster",
    "code",
    "kind",
    "target",
    "topic",
    "id",
    "the",
    "and",
}
#: From here on, Chinese, Japanese and Korean signs are a syllable or a word each, and count as two letters.
SIGNS = "\u2e80"
#: The search if there are only names: without rows, other views cannot be validated.
ALONE = Search((LinearFamily((RAW.scaling,)),), folds=0)


def extract_words(name: str | int) -> str:
    """Return a class's name as words, "" where it says nothing: a code, a number.

    Words are split at changes of case and at signs between them: "cardArrival", "card_arrival".
    """
    pairs = pairwise(f" {unicodedata.normalize('NFC', str(name))}")
    parts = [f" {char}" if before.islower() and char.isupper() else char for before, char in pairs]
    words = "".join(part if _is_part(part[-1]) else " " for part in parts).split()
    signs = [len(word) + sum(char >= SIGNS for char in word) for word in words]
    informative = [
        word for word, size in zip(words, signs, strict=True) if size >= NAMES.least and word.lower() not in EMPTY
    ]
    return " ".join(words) if any(not any(map(str.isdigit, word)) for word in informative) else ""


def distinctive_words(names: Sequence[str | int]) -> list[str]:
    """Return the words of each name, "" where it says nothing but what most names say: "intent 1", "Klasse 3"."""
    texts = list(map(extract_words, names))
    rows_with = Counter(word for text in texts for word in set(text.lower().split()))
    shared = {word for word, count in rows_with.items() if count > max(NAMES.shared * len(texts), 2)}
    remaining = [" ".join(word for word in text.split() if word.lower() not in shared) for text in texts]
    return [text if extract_words(distinctive) else "" for text, distinctive in zip(texts, remaining, strict=True)]


def _is_part(sign: str) -> bool:
    """Return whether a sign is part of a word: a letter, a digit, or a mark on one."""
    return sign.isalnum() or unicodedata.category(sign).startswith("M")


def embed_class_names(
    encoding: Encoding | None,
    classes: Sequence[str | int],
    x: Tensor,
    labels: Tensor,
    descriptions: Sequence[str] | None = None,
) -> ClassNameRows | None:
    """Read what classes are called, and decide how much it counts.

    Args:
        encoding: Of the rows. Names are cells of its columns of embedded text, and pictures to a joint network; other
            columns are as in the class's rows, on average.
        classes: Their names.
        x: (n, dim) rows with a class, as features; there may be none.
        labels: (n,) int64 of these.
        descriptions: Of each class, "" for none; None for none at all.

    Returns:
        The names that say something; None where there is no such column, fewer than two names say something, or rows
        speak against them.
    """
    embedded = _embed_names(encoding, classes, descriptions)
    if embedded is None:
        return None
    rows, known, of_names = embedded
    means, _ = class_means(x.double(), labels, len(classes))
    rows = torch.where(of_names, rows, means[known].float())
    weight = weigh_names(x[:, of_names].float(), labels, rows[:, of_names], known, len(classes))
    return ClassNameRows(rows, known, weight, tuple(descriptions or ())) if weight else None


def classify_by_names(
    encoding: Encoding | None, classes: Sequence[str | int], x: Tensor, descriptions: Sequence[str] | None = None
) -> Tensor | None:
    """Return the class (n,) int64 whose name rows x (n, dim) are nearest to; None where names say nothing."""
    embedded = _embed_names(encoding, classes, descriptions)
    if embedded is None:
        return None
    rows, known, of_names = embedded
    cosines = F.normalize(x[:, of_names].float(), dim=1) @ F.normalize(rows[:, of_names], dim=1).T
    return known[cosines.argmax(dim=1)]


def _embed_names(
    encoding: Encoding | None, classes: Sequence[str | int], descriptions: Sequence[str] | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Embed names as rows (m, dim), with zeros in other features; their classes (m,); a mask of set features (dim,)."""
    pairs = list(zip(distinctive_words(classes), descriptions or [""] * len(classes), strict=True))
    phrases = {index: ": ".join(filter(None, pair)) for index, pair in enumerate(pairs) if any(pair)}
    columns = () if encoding is None else encoding.columns
    if encoding is None or len(set(phrases.values())) < 2:
        return None
    cells = np.array(list(phrases.values()), object)
    rows = torch.zeros(len(phrases), sum(encoding.sizes))
    of_names = torch.zeros(rows.shape[1], dtype=torch.bool)
    for index, column in enumerate(columns):
        encoded = column.encode_class_names(cells)
        if encoded is not None:
            features = torch.from_numpy(encoded)
            feature_indices = list(encoding.feature_range(index))[: features.shape[1]]
            rows[:, feature_indices] = features - features.mean(dim=0)  # names are all unlike texts in the same way
            of_names[feature_indices] = True
    return (rows, torch.tensor(list(phrases)), of_names) if bool(of_names.any()) else None


def weigh_names(x: Tensor, labels: Tensor, names: Tensor, known: Tensor, num_classes: int) -> float:
    """Return how many samples a name counts as, 0 where rows speak against names.

    Args:
        x: (n, dim) rows, in the features that names have.
        labels: (n,) int64.
        names: (m, dim).
        known: (m,) int64, the class of each.
        num_classes: Number of classes.

    Returns:
        0 if names predict the rows worse than chance. Otherwise, if some classes have two rows, the weight with the
        least leave-one-out log-loss, > 0 if a class has a name and no row. Otherwise the weight that was best on other
        data sets.
    """
    name_index = torch.full((num_classes,), -1).scatter_(0, known, torch.arange(len(known)))
    x, names = F.normalize(x, dim=1), F.normalize(names, dim=1)
    has_name = name_index[labels] >= 0
    if bool(has_name.any()):
        log_p = (NAMES.scale * x[has_name] @ names.T).log_softmax(dim=1)
        evidence = log_p.gather(1, name_index[labels[has_name]][:, None]).sum() + int(has_name.sum()) * math.log(
            len(known)
        )
        if float(evidence) + NAMES.prior < 0:
            return 0.0
    count = torch.bincount(labels, minlength=num_classes)
    several = count[labels] > 1
    if not bool(several.any()):
        return NAMES.weight
    sums = torch.zeros(num_classes, x.shape[1]).index_add_(0, labels, x)
    losses, weights = [], [weight for weight in NAMES.weights if weight or bool(count[known].all())]
    for weight in weights:
        totals = sums.index_add(0, known, weight * names)
        cosines = x @ F.normalize(totals, dim=1).T
        left = F.normalize(totals[labels] - x, dim=1)  # its class without the row
        cosines[torch.arange(len(x)), labels] = (x * left).sum(dim=1)
        losses.append(float(fit_temperature(cosines[several], labels[several], totals.any(dim=1))[1].sum()))
    return weights[losses.index(min(losses))]
