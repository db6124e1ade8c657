"""Columns of free text, encoded by principal components of TF-IDF weights and by pretrained embeddings."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from protonet.embeddings.opening import reopen
from protonet.embeddings.representation import Record, Representation
from protonet.tables.columns.base import FittedColumn, OpenRepresentation
from protonet.tables.columns.parsing import format_cells
from protonet.views.config import Stored, expect

if TYPE_CHECKING:
    from scipy import sparse


@dataclass(frozen=True)
class TextRules:
    """Which n-grams and how many components are used; chosen on the data sets of docs/decisions/texts.md."""

    sizes: tuple[int, ...] = (2, 3, 4, 5)  #: Lengths of character n-grams of a word with a space at both ends.
    bigrams: bool = True  #: Whether pairs of adjacent words are counted as well.
    min_rows: int = 1  #: Minimum rows of an n-gram: new rows may share one that a single training row has.
    min_shared_rows: int = 2  #: Minimum rows of the most frequent n-gram; otherwise the column has no features.
    max_grams: int = 16384  #: Maximum number of words, and of character n-grams: the most frequent ones are used.
    max_rows: int = 4096  #: Maximum training rows that are used, equally spaced in sorted order.
    max_rank: int = 512  #: Maximum number of components.
    rank_per_row: float = 1.0  #: Maximum number of components per training row.
    max_basis_size: float = 4e6  #: Maximum number of values in the basis, which the model file stores.
    separate_norms: bool = True  #: Whether words and character n-grams are normalized separately.
    variance_exponent: float = 0.25  #: Exponent of the components' variances: 1 leaves them, 0 whitens.


TEXT_RULES = TextRules()
#: Rules for texts beside other columns, which would be dominated by many components.
SECONDARY_TEXT_RULES = TextRules(
    (3, 4, 5),
    bigrams=False,
    min_rows=2,
    max_grams=4096,
    max_rank=24,
    rank_per_row=0.25,
    max_basis_size=math.inf,
    separate_norms=False,
    variance_exponent=1.0,
)


@dataclass(frozen=True, eq=False)
class Text(FittedColumn):
    """A column of free text, encoded by the principal components of its TF-IDF weights.

    Source: Manning, Raghavan and Schuetze, "Introduction to Information Retrieval" (2008), sec. 6.4 (weights) and 18.4
        (components by singular values).
    """

    grams: tuple[str, ...]  #: The words and character n-grams of the vocabulary, in lower case.
    scales: np.ndarray  #: (grams,) inverse document frequencies.
    basis: np.ndarray  #: (grams, components) the map from TF-IDF weights to components.
    mean: np.ndarray  #: (components,) the mean of the training rows.
    apart: bool = True  #: Whether words and character n-grams are normalized separately.
    kind: ClassVar[str] = "text"
    modality: ClassVar[str | None] = "text"

    @classmethod
    def fit(cls, cells: np.ndarray, *, secondary: bool = False) -> Text:
        """Fit a column of text to cells (n,); it has no features if rows share no n-gram.

        ``secondary`` says whether the table has other columns, so that the text gets fewer components.
        """
        rules = SECONDARY_TEXT_RULES if secondary else TEXT_RULES
        cells = np.sort(format_cells(cells))  # the row order must not influence components of equal variance
        cells = cells[:: max(1, -(-len(cells) // rules.max_rows))]
        counts = [count_grams(cell, rules.sizes, bigrams=rules.bigrams) for cell in cells]
        rows_with = Counter(gram for row in counts for gram in row)
        max_count, min_count = Counter[str](), Counter[str]()  # over the rows that have the n-gram
        for row in counts:
            for gram, count in row.items():
                max_count[gram] = max(max_count[gram], count)
                min_count[gram] = min(min_count[gram] or count, count)
        # An n-gram of every row is informative only if its count varies.
        candidates = [
            (-rows, gram)
            for gram, rows in rows_with.items()
            if rows >= rules.min_rows and (rows < len(cells) or max_count[gram] > min_count[gram])
        ]
        if not any(-rows >= rules.min_shared_rows for rows, _ in candidates):
            candidates = []
        rank = min(rules.max_rank, max(1, round(rules.rank_per_row * len(cells))))
        max_grams = int(min(rules.max_grams, rules.max_basis_size / 2 / rank))
        groups = [candidates]
        if rules.separate_norms:
            groups = [[item for item in candidates if is_word(item[1]) == words] for words in (True, False)]
        grams = tuple(sorted(gram for group in groups for _, gram in sorted(group)[:max_grams]))
        scales = np.array([1 + math.log(len(cells) / rows_with[gram]) for gram in grams], np.float32)
        if not grams:
            return cls(grams, scales, np.zeros((0, 0), np.float32), np.zeros(0, np.float32), rules.separate_norms)
        x = cls(grams, scales, np.zeros((len(grams), 0)), np.zeros(0), rules.separate_norms)._tf_idf(cells)
        mean = np.asarray(x.mean(axis=0)).ravel()
        variances, vectors = np.linalg.eigh(_centred_gram_matrix(x, mean) / len(cells))  # of the (n, n) Gram matrix
        rank = min(rank, int((variances > 1e-9).sum()))
        variances, vectors = variances[::-1][:rank], vectors[:, ::-1][:, :rank]
        directions = x.T @ vectors - mean[:, None] * vectors.sum(axis=0)  # (grams, rank)
        target = variances**rules.variance_exponent
        basis = directions / np.sqrt(variances * len(cells))
        basis = basis * np.sqrt(target / np.where(variances > 0, variances, 1))
        basis /= math.sqrt(target.sum() or 1.0)
        return cls(grams, scales, basis.astype(np.float32), (mean @ basis).astype(np.float32), rules.separate_norms)

    @property
    def feature_suffixes(self) -> tuple[str, ...]:
        """The suffix of each component, in the order of decreasing variance."""
        return tuple(f" text {index + 1}" for index in range(len(self.mean)))

    @cached_property
    def _gram_indices(self) -> dict[str, int]:
        """The index of each n-gram of the vocabulary."""
        return {gram: index for index, gram in enumerate(self.grams)}

    def _tf_idf(self, cells: np.ndarray) -> sparse.csr_matrix:
        """Compute the TF-IDF weights (n, grams) of texts (n,), with unit norm; 0 for texts without a known n-gram."""
        from scipy import sparse  # noqa: PLC0415 - slow to import

        row_ends, indices, values = [0], [], []
        rules = TEXT_RULES if self.apart else SECONDARY_TEXT_RULES
        for cell in cells:
            for gram, count in count_grams(cell, rules.sizes, bigrams=rules.bigrams).items():
                index = self._gram_indices.get(gram)
                if index is not None:
                    indices.append(index)
                    values.append((1 + math.log(count)) * self.scales[index])
            row_ends.append(len(indices))
        x = sparse.csr_matrix((values, indices, row_ends), shape=(len(cells), len(self.grams)))
        if not self.apart:
            return _normalize_rows(x)
        words = np.array([is_word(gram) for gram in self.grams], np.float64)
        parts = [_normalize_rows(x @ sparse.diags(mask)) for mask in (words, 1 - words)]
        return _normalize_rows(parts[0] + parts[1])

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute the components (n, components) float32 of texts (n,)."""
        return np.asarray(self._tf_idf(format_cells(cells)) @ self.basis - self.mean, np.float32)

    def is_uninformative(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the cells without a known n-gram."""
        return np.asarray(self._tf_idf(format_cells(cells)).getnnz(axis=1) == 0)

    def summary(self) -> str:
        """Summarize the number of components and of n-grams in one line."""
        return f"text: {len(self.mean)} components of {len(self.grams)} words and character n-grams"

    @classmethod
    def restore(cls, stored: Stored) -> Text:
        """Restore the column from the untrusted entries of a model file."""
        grams, mean = stored.get_strings("grams"), stored.pop("mean", None)
        apart = stored.entry("apart", bool)
        scales, basis = stored.pop("scales", len(grams)), stored.pop("basis", len(grams), len(mean))
        return cls(grams, scales.numpy(), basis.numpy(), mean.numpy(), apart)


def _normalize_rows(x: sparse.csr_matrix) -> sparse.csr_matrix:
    """Scale rows to unit norm; zero rows stay zeros."""
    from scipy import sparse  # noqa: PLC0415 - slow to import

    norms = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).ravel())
    return sparse.diags(1 / np.where(norms > 0, norms, 1.0)) @ x


def _centred_gram_matrix(x: sparse.csr_matrix, mean: np.ndarray) -> np.ndarray:
    """Compute the Gram matrix (n, n) of rows minus their mean (grams,), without dense rows."""
    products = (x @ x.T).toarray()
    projections = np.asarray(x @ mean).ravel()
    return np.asarray(products - projections[:, None] - projections[None, :] + mean @ mean)


def is_word(gram: str) -> bool:
    """Test whether an n-gram is a word or a pair of words, which have a space at both ends."""
    return len(gram) > 2 and gram[0] == gram[-1] == " "


def count_grams(text: str, sizes: tuple[int, ...] = TEXT_RULES.sizes, *, bigrams: bool = False) -> Counter[str]:
    """Count the words of a text, with a space at both ends, their character n-grams and, optionally, word pairs."""
    counts: Counter[str] = Counter()
    words = [f" {word} " for word in re.findall(r"\w+", text.lower())]
    for word in words:
        counts[word] += 1
        for size in sizes:
            if size < len(word):
                counts.update(word[start : start + size] for start in range(len(word) - size + 1))
    counts.update(first + second for first, second in pairwise(words) if bigrams)
    return counts


#: Weight of words relative to an embedding, and of an embedded text relative to other columns; chosen in
#: docs/decisions/representations.md.
WORD_WEIGHT, SECONDARY_WEIGHT = 0.5, 0.3


@dataclass(frozen=True, eq=False)
class ColumnEmbedding:
    """Embeds the cells of a column by a pretrained network, scaled to a total variance of 1 over the training rows."""

    record: Record  #: Identifies the pretrained representation.
    mean: np.ndarray  #: (width,) the mean of the training rows, which is subtracted.
    scale: float  #: The divisor of embeddings, > 0.
    #: The opened representation, which model files do not store; None to open it when it is needed.
    representation: Representation | None = field(default=None, repr=False)
    show_progress: bool = False  #: Whether to show a progress bar.
    path: str = ""  #: The folder or file that the user opened, to open it again; model files do not store it.

    @classmethod
    def fit(cls, representation: Representation, items: Sequence[Any], *, show_progress: bool) -> ColumnEmbedding:
        """Fit the mean and the scale to non-missing items (n,): texts, or paths of pictures."""
        rows = representation.embed(items, shown=show_progress).astype(np.float64)
        mean = rows.mean(axis=0) if len(rows) else np.zeros(representation.record.width)
        scale = math.sqrt(float(np.square(rows - mean).sum(axis=1).mean())) if len(rows) else 0.0
        mean = mean.astype(np.float32)
        return cls(representation.record, mean, scale or 1.0, representation, show_progress, representation.source)

    def encode(self, items: Sequence[Any]) -> np.ndarray:
        """Compute the embeddings (n, width) float32 of items; texts without a known word are zeros, as the mean is."""
        rows = self._get_representation().embed(items, shown=self.show_progress)
        x = (rows - self.mean) / np.float32(self.scale)
        if self.record.modality == "text":
            x[self.has_no_known_word(items)] = 0
        return np.asarray(x, np.float32)

    def has_no_known_word(self, texts: Sequence[str]) -> np.ndarray:
        """Compute a mask (n,) bool of the texts without a word that the network knows."""
        return ~self._get_representation().contains_known_words(texts)

    def encode_class_names(self, texts: Sequence[str]) -> np.ndarray | None:
        """Embed class names (n,) to (n, width) float32, at the norm of items; None if the network embeds no texts."""
        embed_texts = self._get_representation().embed_texts
        if embed_texts is None:
            return None
        rows = embed_texts(texts)
        norm = math.sqrt(float(np.square(self.mean).sum()) + self.scale**2)  # root mean square of the training rows
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows / norms * norm / self.scale, np.float32)

    def _get_representation(self) -> Representation:
        """Return the representation, which is opened again after pickling or loading."""
        return self.representation or reopen(self.record, [self.path] if self.path else None)

    def attach(self, open_representation: OpenRepresentation, *, show_progress: bool) -> ColumnEmbedding:
        """Return the embedding with its pretrained representation opened."""
        representation = open_representation(self.record)
        return replace(self, representation=representation, show_progress=show_progress, path=representation.source)

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the representation, which pickles omit."""
        return {**vars(self), "representation": None}

    def describe(self) -> dict[str, object]:
        """Return the record and the scale as JSON values."""
        return {"representation": self.record.describe(), "scale": float(self.scale)}

    @classmethod
    def restore(cls, stored: Stored) -> ColumnEmbedding:
        """Restore the embedding, without its representation, from the untrusted entries of a model file."""
        record = Record.restore(Stored(stored.entry("representation", dict), {}))
        scale = stored.get_float("scale", 1e-30)
        return cls(record, stored.pop("centre", record.width).numpy(), scale)


@dataclass(frozen=True, eq=False)
class EmbeddedText(FittedColumn):
    """A column of free text, encoded by a pretrained embedding and by components of its words."""

    embedding: ColumnEmbedding  #: The pretrained embedding.
    words: Text  #: The components of the words, of which there may be none.
    weight: float = 1.0  #: The factor of all features, less than 1 if they would dominate other columns.
    kind: ClassVar[str] = "embedded text"
    modality: ClassVar[str | None] = "text"
    dominates: ClassVar[bool] = True
    max_invalid_fraction: ClassVar[float] = 1.0  #: Rows without a known word get the class frequencies.

    @classmethod
    def fit(
        cls,
        cells: np.ndarray,
        representation: Representation,
        *,
        show_progress: bool = False,
        words: Text | None = None,
        secondary: bool = False,
    ) -> EmbeddedText:
        """Fit a column of text to cells (n,).

        Args:
            cells: (n,) the texts.
            representation: The pretrained representation.
            show_progress: Whether to show a progress bar.
            words: The components of the words, fitted to the same cells; None to fit them.
            secondary: Whether the table has other columns.
        """
        present = [text for text in format_cells(cells).tolist() if text.strip()]
        embedding = ColumnEmbedding.fit(representation, present, show_progress=show_progress)
        return cls(embedding, Text.fit(cells) if words is None else words, SECONDARY_WEIGHT if secondary else 1.0)

    @property
    def feature_suffixes(self) -> tuple[str, ...]:
        """The suffixes of the dimensions of the embedding and of the components of the words."""
        meanings = (f" meaning {index + 1}" for index in range(self.embedding.record.width))
        return (*meanings, *self.words.feature_suffixes)

    @property
    def block_sizes(self) -> list[int]:
        """The number of dimensions of the embedding and of components of the words, which are rescaled separately."""
        return [size for size in (self.embedding.record.width, len(self.words.feature_suffixes)) if size]

    @property
    def standalone_sizes(self) -> list[int]:
        """The number of all features, which a view may use without the other columns."""
        return [len(self.feature_suffixes)]

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute the features (n, features) float32 of texts (n,)."""
        cells = format_cells(cells)
        embeddings, words = self.embedding.encode(cells.tolist()), self.words.encode(cells)
        return np.concatenate([embeddings, np.float32(WORD_WEIGHT) * words], axis=1) * np.float32(self.weight)

    def is_uninformative(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the cells without a word or n-gram that the network or the vocabulary knows."""
        cells = format_cells(cells)
        return np.asarray(self.embedding.has_no_known_word(cells.tolist()) & self.words.is_uninformative(cells))

    def is_invalid(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the texts without a known word, which are treated as missing."""
        cells = format_cells(cells)
        filled = np.array([bool(cell.strip()) for cell in cells], bool)
        return np.asarray(filled & self.is_uninformative(cells))

    @property
    def invalid_reason(self) -> str:
        """The reason in messages why cells are invalid: they have no known word."""
        return "a text without a word that the model knows, treated as missing"

    @property
    def record(self) -> Record:
        """The record of the pretrained representation."""
        return self.embedding.record

    def attach(self, open_representation: OpenRepresentation, *, show_progress: bool) -> EmbeddedText:
        """Return the column with its pretrained representation opened."""
        return replace(self, embedding=self.embedding.attach(open_representation, show_progress=show_progress))

    def encode_class_names(self, texts: np.ndarray) -> np.ndarray:
        """Embed class names (n,) as cells are embedded."""
        return self.encode(texts)

    def summary(self) -> str:
        """Summarize the representation and the components of the words in one line."""
        words = f", and {self.words.summary().removeprefix('text: ')}" if self.words.feature_suffixes else ""
        return f"text by {self.record.summary()}{words}"

    def describe(self) -> dict[str, object]:
        """Return the settings of the embedding, the words and the weight as JSON values."""
        return self.embedding.describe() | self.words.describe() | {"share": self.weight}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the mean of the embedding and the arrays of the words by the names of their tensors."""
        return {"centre": self.embedding.mean, **self.words.tensors()}

    @classmethod
    def restore(cls, stored: Stored) -> EmbeddedText:
        """Restore the column, without its representation, from the untrusted entries of a model file."""
        embedding = ColumnEmbedding.restore(stored)
        expect(embedding.record.modality == "text", "a text column whose representation does not take texts")
        weight = stored.get_float("share", 1e-3, 1.0)
        return cls(embedding, Text.restore(stored), weight)
