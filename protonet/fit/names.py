"""Class names as training data: a name is embedded like a text, and counts as several samples of its class.

Names contribute to the sums and counts of the prototypes, so that the influence of a name falls with the number of
samples. See docs/decisions/names.md.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.errors import install_command, raise_input_error
from protonet.files.metadata import ClassNameMetadata
from protonet.fit.search import RAW_LINEAR, ModelSearch
from protonet.fit.training_set import ClassNameRows
from protonet.losses import class_means
from protonet.selection.scoring import fit_temperature
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.parsing import BOOLEAN_SPELLINGS
from protonet.tables.table import format_names
from protonet.views.linear import LinearFamily

#: With names and no rows, logits are multiplied by 1 plus this number divided by the number of classes.
NAMES_ONLY_SHARPENING = 12.0
#: Words that do not distinguish one class from another.
GENERIC_WORDS = {
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
    *BOOLEAN_SPELLINGS,
}
#: First Chinese, Japanese or Korean character in Unicode. This character and all later ones count as two letters each.
FIRST_CJK_CHARACTER = "\u2e80"
#: Search space of a fit to class names alone: without rows, other views cannot be validated.
CLASS_NAMES_ONLY_SEARCH = ModelSearch((LinearFamily((RAW_LINEAR.scaling,)),), n_folds=0)


def split_name_into_words(name: str | int) -> str:
    """Rewrite a class name as words with spaces, such as "card arrival" for "card_arrival".

    The result is "" if the name is a number or has no informative word, such as a code or "true".
    """
    # Minimum number of letters of an informative word.
    min_word_letters = 3
    pairs = pairwise(f" {unicodedata.normalize('NFC', str(name))}")
    parts = [f" {char}" if before.islower() and char.isupper() else char for before, char in pairs]
    words = "".join(part if _is_word_character(part[-1]) else " " for part in parts).split()
    sizes = [len(word) + sum(char >= FIRST_CJK_CHARACTER for char in word) for word in words]
    informative = [
        word
        for word, size in zip(words, sizes, strict=True)
        if size >= min_word_letters and word.lower() not in GENERIC_WORDS
    ]
    return " ".join(words) if any(not any(map(str.isdigit, word)) for word in informative) else ""


def distinctive_words(names: Sequence[str | int]) -> list[str]:
    """Rewrite class names as words; "" for a name without a word of its own, such as "intent 1" beside "intent 2"."""
    # A word in more than this fraction of the names does not distinguish classes.
    max_word_frequency = 0.5
    texts = list(map(split_name_into_words, names))
    counts = Counter(word for text in texts for word in set(text.lower().split()))
    shared = {word for word, count in counts.items() if count > max(max_word_frequency * len(texts), 2)}
    remaining = [" ".join(word for word in text.split() if word.lower() not in shared) for text in texts]
    are_named = map(bool, map(split_name_into_words, remaining))
    return [text if is_named else "" for text, is_named in zip(texts, are_named, strict=True)]


def _is_word_character(character: str) -> bool:
    """Test whether a character is part of a word: a letter, a digit, or a combining mark."""
    return character.isalnum() or unicodedata.category(character).startswith("M")


def embed_class_names(
    encoding: Encoding | None,
    classes: Sequence[str | int],
    x: Tensor,
    labels: Tensor,
    descriptions: Sequence[str] | None = None,
) -> ClassNameRows | None:
    """Embed class names as training rows, and choose how many samples a name counts as.

    In text columns, the name is embedded as if it were the text. In picture columns, a joint network of pictures and
    texts embeds it. All other features are the means of the rows of the class.

    Args:
        encoding: The encoding of the table; None if the features have no columns of texts or pictures.
        classes: The class names.
        x: (n, dim) features of the labelled rows.
        labels: (n,) int64 class indices of the rows.
        descriptions: A description of each class, which is embedded with its name; "" for a class without one.

    Returns:
        The embedded names. None if no column can embed names, if fewer than two names are informative, or if the names
        do not predict the labels.
    """
    embedded = _embed_names(encoding, classes, descriptions)
    if embedded is None:
        return None
    rows, named, has_names = embedded
    means, _ = class_means(x.double(), labels, len(classes))
    rows = torch.where(has_names, rows, means[named].float())
    weight = choose_name_weight(x[:, has_names].float(), labels, rows[:, has_names], named, len(classes))
    return ClassNameRows(rows, named, weight, tuple(descriptions or ())) if weight else None


def classify_by_names(
    encoding: Encoding | None, classes: Sequence[str | int], x: Tensor, descriptions: Sequence[str] | None = None
) -> Tensor | None:
    """Compute for each row of x (n, dim) the class (n,) int64 whose embedded name is nearest by cosine.

    The arguments are those of `embed_class_names`. Returns None if the names are uninformative or cannot be embedded.
    """
    embedded = _embed_names(encoding, classes, descriptions)
    if embedded is None:
        return None
    rows, named, has_names = embedded
    cosines = F.normalize(x[:, has_names].float(), dim=1) @ F.normalize(rows[:, has_names], dim=1).T
    return named[cosines.argmax(dim=1)]


def _embed_names(
    encoding: Encoding | None, classes: Sequence[str | int], descriptions: Sequence[str] | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Embed informative names: rows (m, dim), classes (m,), a mask (dim,) of embedded features; None if impossible."""
    pairs = list(zip(distinctive_words(classes), descriptions or [""] * len(classes), strict=True))
    phrases = {index: ": ".join(filter(None, pair)) for index, pair in enumerate(pairs) if any(pair)}
    if encoding is None or len(set(phrases.values())) < 2:
        return None
    cells = np.array(list(phrases.values()), object)
    rows = torch.zeros(len(phrases), sum(encoding.n_features_per_column))
    has_names = torch.zeros(rows.shape[1], dtype=torch.bool)
    for index, column in enumerate(encoding.columns):
        encoded = column.encode_class_names(cells)
        if encoded is not None:
            features = torch.from_numpy(encoded)
            feature_indices = list(encoding.feature_range(index))[: features.shape[1]]
            # Without their mean: names differ from texts in the same way.
            rows[:, feature_indices] = features - features.mean(dim=0)
            has_names[feature_indices] = True
    return (rows, torch.tensor(list(phrases)), has_names) if bool(has_names.any()) else None


#: Inverse temperature of the cosines of rows to names, in a test whether names fit the labels.
NAME_INVERSE_TEMPERATURE = 10.0
#: Prior evidence for names in that test, in nats, since names are rarely uninformative.
NAME_PRIOR_EVIDENCE = 1.0
#: Number of samples that a name counts as, if no class has two rows. Of 2, 4 and 8, on one docstring per module.
DEFAULT_NAME_WEIGHT = 4.0
#: Numbers of samples that a name may count as. If a class has two rows, `choose_name_weight` selects one.
NAME_WEIGHTS = (0.0, 1.0, 2.0, 4.0, 8.0)


def choose_name_weight(
    x: Tensor, labels: Tensor, name_features: Tensor, name_labels: Tensor, num_classes: int
) -> float:
    """Choose the number of samples that a class name counts as; 0 if the names do not predict the labels.

    If no class has two rows, the number is ``DEFAULT_NAME_WEIGHT``. Otherwise, it is the one of ``NAME_WEIGHTS`` with
    the smallest leave-one-out log-loss of all rows plus the cost of its prior, and positive if a class has a name and
    no row. Rows are x (n, dim) with ``labels`` (n,), and names ``name_features`` (m, dim) with ``name_labels`` (m,).
    """
    # The prior: each doubling or halving away from this number costs one nat. The losses of few rows alone often select
    # another one by chance (docs/decisions/names.md).
    likely_weight = 2.0
    name_index = torch.full((num_classes,), -1).scatter_(0, name_labels, torch.arange(len(name_labels)))
    x, name_features = F.normalize(x, dim=1), F.normalize(name_features, dim=1)
    has_name = name_index[labels] >= 0
    if bool(has_name.any()):
        log_p = (NAME_INVERSE_TEMPERATURE * x[has_name] @ name_features.T).log_softmax(dim=1)
        evidence = log_p.gather(1, name_index[labels[has_name]][:, None]).sum()
        evidence = evidence + int(has_name.sum()) * math.log(len(name_labels))
        if float(evidence) + NAME_PRIOR_EVIDENCE < 0:
            return 0.0
    count = torch.bincount(labels, minlength=num_classes)
    several = count[labels] > 1
    if not bool(several.any()):
        return DEFAULT_NAME_WEIGHT
    sums = torch.zeros(num_classes, x.shape[1]).index_add_(0, labels, x)
    losses, all_known = [], bool(count[name_labels].all())
    weights = [weight for weight in NAME_WEIGHTS if weight or all_known]
    for weight in weights:
        totals = sums.index_add(0, name_labels, weight * name_features)
        cosines = x @ F.normalize(totals, dim=1).T
        without_row = F.normalize(totals[labels] - x, dim=1)  # class sum without the row
        cosines[torch.arange(len(x)), labels] = (x * without_row).sum(dim=1)
        losses.append(float(fit_temperature(cosines[several], labels[several], totals.any(dim=1))[1].sum()))
    costs = [abs(math.log2(max(weight, 0.5) / likely_weight)) for weight in weights]
    return min(zip(weights, losses, costs, strict=True), key=lambda item: item[1] + item[2])[0]


def describe_class_names(names: ClassNameRows, classes: Sequence[str | int]) -> ClassNameMetadata:
    """Describe embedded class names for a model file, given the names of all classes."""
    named = tuple(classes[label] for label in names.labels.tolist())
    return ClassNameMetadata(classes=named, weight=float(names.sample_count), descriptions=names.descriptions)


def raise_missing_labels(encoding: Encoding | None, classes: Sequence[str | int]) -> NoReturn:
    """Raise an InputError that says why ``fit`` cannot use a table without labels.

    Without labels, a classifier can only compare texts to class names. The message says which of both is missing.
    """
    columns = () if encoding is None else encoding.columns
    texts = [column for column in columns if column.modality == "text"]
    if any(column.encoder_record is not None for column in texts):
        got = format_names(list(map(str, classes)))
        remedy = "Add a column description, or label rows."
        raise_input_error("classes", "name or describe classes in words", got, remedy)
    if texts:
        remedy = f"Run {install_command('text')}, pass `representation`, or label some rows."
        raise_input_error("table", "have labels, or texts and a pretrained encoder", "texts alone", remedy)
    raise_input_error("table", "have labels, or texts", "neither", "Label some rows.")
