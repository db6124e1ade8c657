"""Names of classes as data: what a class is called, read by what reads the rows, counts as some samples of it.

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

from protonet.fit.problem import Names
from protonet.fit.search import RAW, Search
from protonet.losses import class_means
from protonet.scoring import fit_temperature
from protonet.tables.columns.encoding import Encoding
from protonet.views.linear import LinearFamily


@dataclass(frozen=True)
class NameRules:
    """How much a name counts; set on the developing half of the sets of docs/decisions/names.md."""

    scale: float = 10.0  #: Of the cosines of rows and names, as logits, in judging whether names fit their rows.
    prior: float = 1.0  #: Nats that speak for names before any row does: words are rarely without meaning.
    weight: float = 2.0  #: Samples that a name counts as, where no class has two rows.
    weights: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0, 8.0)  #: The same, to choose from on rows left out.
    sharper: float = 12.0  #: Where there are names alone, logits are multiplied with 1 and this over the classes.
    least: int = 3  #: Letters of a word that says something.
    shared: float = 0.5  #: A word of more than this share of the names tells none of them from the others.


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
#: From here on, Chinese, Japanese and Korean signs stand for a syllable or a word each, and count as two letters.
SIGNS = "\u2e80"
#: What is learned from where there are names alone: whatever else is tried has no row to be judged by.
ALONE = Search((LinearFamily((RAW.scaling,)),), folds=0)


def find_words(name: str | int) -> str:
    """Return a class's name as words, "" where it says nothing: a code, a number.

    Words in other cases, or with signs between them, are told apart: "cardArrival", "card_arrival".
    """
    pairs = pairwise(f" {unicodedata.normalize('NFC', str(name))}")
    parts = [f" {each}" if before.islower() and each.isupper() else each for before, each in pairs]
    words = "".join(part if _is_part(part[-1]) else " " for part in parts).split()
    signs = [len(word) + sum(each >= SIGNS for each in word) for word in words]
    told = [word for word, size in zip(words, signs, strict=True) if size >= NAMES.least and word.lower() not in EMPTY]
    return " ".join(words) if any(not any(map(str.isdigit, word)) for word in told) else ""


def find_different(names: Sequence[str | int]) -> list[str]:
    """Return the words of each name, "" where it says nothing but what most names say: "intent 1", "Klasse 3"."""
    found = list(map(find_words, names))
    rows_with = Counter(word for text in found for word in set(text.lower().split()))
    shared = {word for word, count in rows_with.items() if count > max(NAMES.shared * len(found), 2)}
    rest = [" ".join(word for word in text.split() if word.lower() not in shared) for text in found]
    return [text if find_words(own) else "" for text, own in zip(found, rest, strict=True)]


def _is_part(sign: str) -> bool:
    """Return whether a sign is part of a word: a letter, a digit, or a mark on one."""
    return sign.isalnum() or unicodedata.category(sign).startswith("M")


def read_names(
    encoding: Encoding | None,
    classes: Sequence[str | int],
    x: Tensor,
    labels: Tensor,
    descriptions: Sequence[str] | None = None,
) -> Names | None:
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
    found = _embed_names(encoding, classes, descriptions)
    if found is None:
        return None
    rows, known, of_names = found
    means, _ = class_means(x.double(), labels, len(classes))
    rows = torch.where(of_names, rows, means[known].float())
    weight = weigh_names(x[:, of_names].float(), labels, rows[:, of_names], known, len(classes))
    return Names(rows, known, weight, tuple(descriptions or ())) if weight else None


def classify_by_names(
    encoding: Encoding | None, classes: Sequence[str | int], x: Tensor, descriptions: Sequence[str] | None = None
) -> Tensor | None:
    """Return the class (n,) int64 whose name rows x (n, dim) are nearest to; None where names say nothing."""
    found = _embed_names(encoding, classes, descriptions)
    if found is None:
        return None
    rows, known, of_names = found
    cosines = F.normalize(x[:, of_names].float(), dim=1) @ F.normalize(rows[:, of_names], dim=1).T
    return known[cosines.argmax(dim=1)]


def _embed_names(
    encoding: Encoding | None, classes: Sequence[str | int], descriptions: Sequence[str] | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return names as rows (m, dim), zeros in what they do not tell; their classes (m,); and what they tell (dim,)."""
    said = list(zip(find_different(classes), descriptions or [""] * len(classes), strict=True))
    phrases = {number: ": ".join(filter(None, pair)) for number, pair in enumerate(said) if any(pair)}
    columns = () if encoding is None else encoding.columns
    if encoding is None or len(set(phrases.values())) < 2:
        return None
    cells = np.array(list(phrases.values()), object)
    rows = torch.zeros(len(phrases), sum(encoding.sizes))
    of_names = torch.zeros(rows.shape[1], dtype=torch.bool)
    for number, column in enumerate(columns):
        found = column.encode_class_names(cells)
        if found is not None:
            own = torch.from_numpy(found)
            place = list(encoding.feature_range(number))[: own.shape[1]]
            rows[:, place] = own - own.mean(dim=0)  # names are all unlike texts in the same way
            of_names[place] = True
    return (rows, torch.tensor(list(phrases)), of_names) if bool(of_names.any()) else None


def weigh_names(x: Tensor, labels: Tensor, names: Tensor, known: Tensor, num_classes: int) -> float:
    """Return how many samples a name counts as, 0 where rows speak against names.

    Args:
        x: (n, dim) rows, of what names tell.
        labels: (n,) int64.
        names: (m, dim).
        known: (m,) int64, the class of each.
        num_classes: Number of classes.

    Returns:
        Where the rows are unlikelier by names alone than by chance, 0. Where some classes have two rows, what leaves
        the least log-loss, row by row left out, but more than 0 where a class has a name and no row; otherwise what was
        best on other problems.
    """
    place = torch.full((num_classes,), -1).scatter_(0, known, torch.arange(len(known)))
    x, names = F.normalize(x, dim=1), F.normalize(names, dim=1)
    judged = place[labels] >= 0
    if bool(judged.any()):
        log_p = (NAMES.scale * x[judged] @ names.T).log_softmax(dim=1)
        evidence = log_p.gather(1, place[labels[judged]][:, None]).sum() + int(judged.sum()) * math.log(len(known))
        if float(evidence) + NAMES.prior < 0:
            return 0.0
    count = torch.bincount(labels, minlength=num_classes)
    several = count[labels] > 1
    if not bool(several.any()):
        return NAMES.weight
    sums = torch.zeros(num_classes, x.shape[1]).index_add_(0, labels, x)
    losses, weights = [], [weight for weight in NAMES.weights if weight or bool(count[known].all())]
    for weight in weights:
        whole = sums.index_add(0, known, weight * names)
        cosines = x @ F.normalize(whole, dim=1).T
        left = F.normalize(whole[labels] - x, dim=1)  # its own class without the row
        cosines[torch.arange(len(x)), labels] = (x * left).sum(dim=1)
        losses.append(float(fit_temperature(cosines[several], labels[several], whole.any(dim=1))[1].sum()))
    return weights[losses.index(min(losses))]
