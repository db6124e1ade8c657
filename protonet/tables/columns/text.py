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

from protonet.embeddings.encoder import EncoderRecord, PretrainedEncoder
from protonet.embeddings.loading import reload_encoder
from protonet.tables.columns.base import EncoderLoader, FittedColumn
from protonet.tables.columns.parsing import format_cells
from protonet.views.config import UntrustedComponent, raise_unless

if TYPE_CHECKING:
    from scipy import sparse


@dataclass(frozen=True)
class TextFeatureLimits:
    """Limits of the n-grams of texts that are counted, and of the principal components of their weights.

    The values were chosen on the data sets of docs/decisions/texts.md.
    """

    ngram_lengths: tuple[int, ...] = (2, 3, 4, 5)  #: Lengths of character n-grams of a word with a space at both ends.
    count_bigrams: bool = True  #: Whether pairs of adjacent words are counted as well.
    #: Minimum number of training rows with an n-gram. 1 is enough, as new rows may have the n-gram as well.
    min_rows_per_ngram: int = 1
    #: Minimum number of training rows with the most frequent n-gram; otherwise the column has no features.
    min_rows_of_most_frequent_ngram: int = 2
    max_ngrams: int = 16384  #: Maximum number of words, and of character n-grams: the most frequent ones are used.
    max_fitted_rows: int = 4096  #: Maximum training rows that are used, equally spaced in sorted order.
    max_components: int = 512  #: Maximum number of components.
    max_components_per_row: float = 1.0  #: Maximum number of components per training row.
    max_basis_elements: float = 4e6  #: Maximum number of n-grams times components, whose weights the model file stores.
    #: Whether the weights of words and those of character n-grams are scaled to norm 1 separately, before their sum is.
    normalize_separately: bool = True
    #: The variance of each component is raised to this power: 1 keeps the variances, 0 makes them equal (whitening).
    variance_exponent: float = 0.25


TEXT_FEATURES = TextFeatureLimits()
#: Rules for a text in a table with other columns. It gets fewer components, so that it does not outweigh these columns.
SECONDARY_TEXT_FEATURES = TextFeatureLimits(
    (3, 4, 5),
    count_bigrams=False,
    min_rows_per_ngram=2,
    max_ngrams=4096,
    max_components=24,
    max_components_per_row=0.25,
    max_basis_elements=math.inf,
    normalize_separately=False,
    variance_exponent=1.0,
)


@dataclass(frozen=True, eq=False)
class Text(FittedColumn):
    """A fitted column of free text, encoded by the principal components of its TF-IDF weights.

    Source: Manning, Raghavan and Schuetze, "Introduction to Information Retrieval" (2008), sec. 6.4 (weights) and 18.4
        (components by singular values).
    """

    ngrams: tuple[str, ...] = field(repr=False, metadata={"key": "grams"})
    """The words and character n-grams of the vocabulary, in lower case."""
    inverse_document_frequencies: np.ndarray = field(metadata={"key": "scales"})  #: (ngrams,) float32.
    basis: np.ndarray  #: (ngrams, components) the matrix by which TF-IDF weights are multiplied to get components.
    mean: np.ndarray  #: (components,) the mean of the training rows, which is subtracted.
    #: Whether the weights of words and of character n-grams are scaled to norm 1 separately.
    normalize_separately: bool = field(default=True, metadata={"key": "apart"})
    column_type: ClassVar[str] = "text"
    modality: ClassVar[str | None] = "text"

    @classmethod
    def fit(cls, cells: np.ndarray, *, has_other_columns: bool = False) -> Text:
        """Fit a column of text to cells (n,); it has no features if no two rows share an n-gram.

        If the table ``has_other_columns``, the text gets fewer components.
        """
        rules = SECONDARY_TEXT_FEATURES if has_other_columns else TEXT_FEATURES
        cells = np.sort(format_cells(cells))  # the row order must not influence components of equal variance
        cells = cells[:: max(1, -(-len(cells) // rules.max_fitted_rows))]
        counts = [count_ngrams(cell, rules.ngram_lengths, word_bigrams=rules.count_bigrams) for cell in cells]
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
            if rows >= rules.min_rows_per_ngram and (rows < len(cells) or max_count[gram] > min_count[gram])
        ]
        if not any(-rows >= rules.min_rows_of_most_frequent_ngram for rows, _ in candidates):
            candidates = []
        rank = min(rules.max_components, max(1, round(rules.max_components_per_row * len(cells))))
        max_grams = int(min(rules.max_ngrams, rules.max_basis_elements / 2 / rank))
        groups = [candidates]
        if rules.normalize_separately:
            groups = [[item for item in candidates if is_word_or_bigram(item[1]) == words] for words in (True, False)]
        grams = tuple(sorted(gram for group in groups for _, gram in sorted(group)[:max_grams]))
        scales = np.array([1 + math.log(len(cells) / rows_with[gram]) for gram in grams], np.float32)
        if not grams:
            return cls(grams, scales, np.zeros((0, 0), np.float32), np.zeros(0, np.float32), rules.normalize_separately)
        x = cls(grams, scales, np.zeros((len(grams), 0)), np.zeros(0), rules.normalize_separately)._tf_idf(cells)
        mean = np.asarray(x.mean(axis=0)).ravel()
        variances, vectors = np.linalg.eigh(_centred_gram_matrix(x, mean) / len(cells))  # of the (n, n) Gram matrix
        rank = min(rank, int((variances > 1e-9).sum()))
        variances, vectors = variances[::-1][:rank], vectors[:, ::-1][:, :rank]
        directions = x.T @ vectors - mean[:, None] * vectors.sum(axis=0)  # (grams, rank)
        target = variances**rules.variance_exponent
        basis = directions / np.sqrt(variances * len(cells))
        basis = basis * np.sqrt(target / np.where(variances > 0, variances, 1))
        basis /= math.sqrt(target.sum() or 1.0)
        centre = (mean @ basis).astype(np.float32)
        return cls(grams, scales, basis.astype(np.float32), centre, rules.normalize_separately)

    @property
    def feature_name_suffixes(self) -> tuple[str, ...]:
        """The suffix of each feature's name. The features are components in the order of decreasing variance."""
        return tuple(f" text {index + 1}" for index in range(len(self.mean)))

    @cached_property
    def _ngram_indices(self) -> dict[str, int]:
        """The index of each n-gram of the vocabulary."""
        return {gram: index for index, gram in enumerate(self.ngrams)}

    def _tf_idf(self, cells: np.ndarray) -> sparse.csr_matrix:
        """Compute the TF-IDF weights (n, ngrams) of texts (n,), with norm 1; zeros if a text has no known n-gram."""
        from scipy import sparse  # noqa: PLC0415 - slow to import

        row_ends, indices, values = [0], [], []
        rules = TEXT_FEATURES if self.normalize_separately else SECONDARY_TEXT_FEATURES
        for cell in cells:
            for gram, count in count_ngrams(cell, rules.ngram_lengths, word_bigrams=rules.count_bigrams).items():
                index = self._ngram_indices.get(gram)
                if index is not None:
                    indices.append(index)
                    values.append((1 + math.log(count)) * self.inverse_document_frequencies[index])
            row_ends.append(len(indices))
        x = sparse.csr_matrix((values, indices, row_ends), shape=(len(cells), len(self.ngrams)))
        if not self.normalize_separately:
            return _normalize_rows(x)
        words = np.array([is_word_or_bigram(gram) for gram in self.ngrams], np.float64)
        parts = [_normalize_rows(x @ sparse.diags(mask)) for mask in (words, 1 - words)]
        return _normalize_rows(parts[0] + parts[1])

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute the principal components (n, components) float32 of texts (n,)."""
        return np.asarray(self._tf_idf(format_cells(cells)) @ self.basis - self.mean, np.float32)

    def is_uninformative(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the cells without an n-gram of the training vocabulary."""
        return np.asarray(self._tf_idf(format_cells(cells)).getnnz(axis=1) == 0)

    def summary(self) -> str:
        """Summarize the number of components and of n-grams in one line, for users."""
        return f"text: {len(self.mean)} components of {len(self.ngrams)} words and character n-grams"

    @classmethod
    def restore(cls, stored: UntrustedComponent) -> Text:
        """Restore the column from the untrusted entries of a model file."""
        grams, mean = stored.get_strings("grams"), stored.pop_tensor("mean", None)
        normalize_separately = stored.get_entry("apart", bool)
        scales, basis = stored.pop_tensor("scales", len(grams)), stored.pop_tensor("basis", len(grams), len(mean))
        return cls(grams, scales.numpy(), basis.numpy(), mean.numpy(), normalize_separately)


def _normalize_rows(x: sparse.csr_matrix) -> sparse.csr_matrix:
    """Scale rows to unit norm; zero rows stay zeros."""
    from scipy import sparse  # noqa: PLC0415 - slow to import

    norms = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).ravel())
    return sparse.diags(1 / np.where(norms > 0, norms, 1.0)) @ x


def _centred_gram_matrix(x: sparse.csr_matrix, mean: np.ndarray) -> np.ndarray:
    """Compute the Gram matrix (n, n) of sparse rows minus their mean (ngrams,), without making the rows dense."""
    products = (x @ x.T).toarray()
    projections = np.asarray(x @ mean).ravel()
    return np.asarray(products - projections[:, None] - projections[None, :] + mean @ mean)


def is_word_or_bigram(gram: str) -> bool:
    """Test whether an n-gram of `count_ngrams` is a word or a pair of words: only these have a space at both ends."""
    return len(gram) > 2 and gram[0] == gram[-1] == " "


def count_ngrams(
    text: str, ngram_lengths: tuple[int, ...] = TEXT_FEATURES.ngram_lengths, *, word_bigrams: bool = False
) -> Counter[str]:
    """Count the words of a text in lower case, their character n-grams and, optionally, pairs of adjacent words.

    Words and pairs of words have a space at both ends.
    """
    counts: Counter[str] = Counter()
    words = [f" {word} " for word in re.findall(r"\w+", text.lower())]
    for word in words:
        counts[word] += 1
        for size in ngram_lengths:
            if size < len(word):
                counts.update(word[start : start + size] for start in range(len(word) - size + 1))
    counts.update(first + second for first, second in pairwise(words) if word_bigrams)
    return counts


#: Factor of the components of words beside an embedding of the same text, and factor of all features of an embedded
#: text in a table with other columns; chosen in docs/decisions/representations.md.
WORD_COMPONENTS_WEIGHT, SECONDARY_TEXT_WEIGHT = 0.5, 0.3


@dataclass(frozen=True, eq=False)
class ColumnEmbedding:
    """Embeds the cells of a column by a pretrained encoder.

    The embeddings are centred and scaled. The sum of their variances over the training rows is 1.
    """

    record: EncoderRecord  #: Identifies the pretrained network.
    mean: np.ndarray  #: (width,) the mean embedding of the training rows, which is subtracted.
    scale: float  #: The divisor of embeddings, > 0.
    #: The loaded network, which model files do not store; None to load it when it is needed.
    encoder: PretrainedEncoder | None = field(default=None, repr=False)
    show_progress: bool = False  #: Whether to show a progress bar.
    #: The folder or file from which the user loaded the network; "" for a network of an installed package. Model files
    #: do not store it.
    path: str = ""

    @classmethod
    def fit(cls, encoder: PretrainedEncoder, items: Sequence[Any], *, show_progress: bool) -> ColumnEmbedding:
        """Fit the mean and the scale to the embeddings of non-missing items (n,): texts, or paths of pictures."""
        rows = encoder.embed(items, show_progress=show_progress).astype(np.float64)
        mean = rows.mean(axis=0) if len(rows) else np.zeros(encoder.record.width)
        scale = math.sqrt(float(np.square(rows - mean).sum(axis=1).mean())) if len(rows) else 0.0
        mean = mean.astype(np.float32)
        return cls(encoder.record, mean, scale or 1.0, encoder, show_progress, encoder.user_path)

    def encode(self, items: Sequence[Any]) -> np.ndarray:
        """Compute the centred and scaled embeddings (n, width) float32 of items (n,): texts, or paths of pictures.

        A text without a word that the network knows gets zeros, the mean of the training rows.
        """
        rows = self._get_encoder().embed(items, show_progress=self.show_progress)
        x = (rows - self.mean) / np.float32(self.scale)
        if self.record.modality == "text":
            x[self.has_no_known_word(items)] = 0
        return np.asarray(x, np.float32)

    def has_no_known_word(self, texts: Sequence[str]) -> np.ndarray:
        """Compute a mask (n,) bool of the texts without a word that the network knows."""
        return ~self._get_encoder().contains_known_words(texts)

    def encode_class_names(self, texts: Sequence[str]) -> np.ndarray | None:
        """Embed class names (n,) by the network's text encoder, scaled as training embeddings; None without one."""
        embed_texts = self._get_encoder().embed_texts
        if embed_texts is None:
            return None
        rows = embed_texts(texts)
        norm = math.sqrt(float(np.square(self.mean).sum()) + self.scale**2)  # root mean square of the training rows
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows / norms * norm / self.scale, np.float32)

    def _get_encoder(self) -> PretrainedEncoder:
        """Return the pretrained encoder, which is loaded first if the object comes from a pickle or a model file."""
        return self.encoder or reload_encoder(self.record, [self.path] if self.path else None)

    def with_loaded_encoder(self, load_encoder: EncoderLoader, *, show_progress: bool) -> ColumnEmbedding:
        """Return a copy of the embedding with its pretrained network loaded."""
        encoder = load_encoder(self.record)
        return replace(self, encoder=encoder, show_progress=show_progress, path=encoder.user_path)

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a pickle, without the loaded network."""
        return {**vars(self), "encoder": None}

    def stored_values(self) -> dict[str, object]:
        """Return the record of the network and the scale as JSON values."""
        return {"representation": self.record.to_dict(), "scale": float(self.scale)}

    @classmethod
    def restore(cls, stored: UntrustedComponent) -> ColumnEmbedding:
        """Restore the embedding from the untrusted entries of a model file. Its network is not loaded yet."""
        record = EncoderRecord.from_stored(UntrustedComponent(stored.get_entry("representation", dict), {}))
        scale = stored.get_float("scale", 1e-30)
        return cls(record, stored.pop_tensor("centre", record.width).numpy(), scale)


@dataclass(frozen=True, eq=False)
class EmbeddedText(FittedColumn):
    """A fitted column of free text, encoded by a pretrained network and by the words of the text.

    The features are the embedding, followed by the principal components of the TF-IDF weights of the words.
    """

    embedding: ColumnEmbedding  #: The embedding by the pretrained network.
    words: Text  #: The principal components of the words; the column may have no such features.
    weight: float = 1.0  #: The factor of all features, less than 1 if they would outweigh other columns.
    column_type: ClassVar[str] = "embedded text"
    modality: ClassVar[str | None] = "text"
    outweighs_other_columns: ClassVar[bool] = True
    #: Texts without a known word are never an error. The prediction for such rows is the class frequencies.
    max_invalid_fraction: ClassVar[float] = 1.0

    @classmethod
    def fit(
        cls,
        cells: np.ndarray,
        encoder: PretrainedEncoder,
        *,
        show_progress: bool = False,
        words: Text | None = None,
        has_other_columns: bool = False,
    ) -> EmbeddedText:
        """Fit a column of text to cells (n,), with the ``words`` if these are fitted to the same cells already.

        If the table ``has_other_columns``, the features get a smaller weight.
        """
        present = [text for text in format_cells(cells).tolist() if text.strip()]
        embedding = ColumnEmbedding.fit(encoder, present, show_progress=show_progress)
        weight = SECONDARY_TEXT_WEIGHT if has_other_columns else 1.0
        return cls(embedding, Text.fit(cells) if words is None else words, weight)

    @property
    def feature_name_suffixes(self) -> tuple[str, ...]:
        """The suffix of each feature's name: the dimensions of the embedding, then the components of the words."""
        meanings = (f" meaning {index + 1}" for index in range(self.embedding.record.width))
        return (*meanings, *self.words.feature_name_suffixes)

    @property
    def feature_block_sizes(self) -> list[int]:
        """The sizes of the blocks: the dimensions of the embedding, and the components of the words, if any."""
        return [size for size in (self.embedding.record.width, len(self.words.feature_name_suffixes)) if size]

    @property
    def standalone_feature_block_sizes(self) -> list[int]:
        """A list of one number, the number of all features: a feature map (view) may use them without other columns."""
        return [len(self.feature_name_suffixes)]

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Compute the features (n, features) float32 of texts (n,)."""
        cells = format_cells(cells)
        embeddings, words = self.embedding.encode(cells.tolist()), self.words.encode(cells)
        features = np.concatenate([embeddings, np.float32(WORD_COMPONENTS_WEIGHT) * words], axis=1)
        return features * np.float32(self.weight)

    def is_uninformative(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the cells without a word that the network or the training vocabulary knows."""
        cells = format_cells(cells)
        return np.asarray(self.embedding.has_no_known_word(cells.tolist()) & self.words.is_uninformative(cells))

    def is_invalid(self, cells: np.ndarray) -> np.ndarray:
        """Compute a mask (n,) bool of the texts without a known word, which are treated as missing."""
        cells = format_cells(cells)
        filled = np.array([bool(cell.strip()) for cell in cells], bool)
        return np.asarray(filled & self.is_uninformative(cells))

    @property
    def invalid_reason(self) -> str:
        """The phrase by which messages explain an invalid cell: it has no known word."""
        return "a text without a word that the model knows, treated as missing"

    @property
    def encoder_record(self) -> EncoderRecord:
        """The record that identifies the pretrained network."""
        return self.embedding.record

    def with_loaded_encoder(self, load_encoder: EncoderLoader, *, show_progress: bool) -> EmbeddedText:
        """Return a copy of the column with its pretrained network loaded."""
        return replace(self, embedding=self.embedding.with_loaded_encoder(load_encoder, show_progress=show_progress))

    def encode_class_names(self, texts: np.ndarray) -> np.ndarray:
        """Compute the features (n, features) float32 of class names (n,), in the same way as those of cells."""
        return self.encode(texts)

    def summary(self) -> str:
        """Summarize the network and the components of the words in one line, for users."""
        words = f", and {self.words.summary().removeprefix('text: ')}" if self.words.feature_name_suffixes else ""
        return f"text by {self.encoder_record.summary()}{words}"

    def stored_values(self) -> dict[str, object]:
        """Return the settings of the embedding and of the words, and the weight, as a dict of JSON values."""
        return self.embedding.stored_values() | self.words.stored_values() | {"share": self.weight}

    def stored_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays to store in a model file, by name: the mean embedding, "centre", and those of the words."""
        return {"centre": self.embedding.mean, **self.words.stored_arrays()}

    @classmethod
    def restore(cls, stored: UntrustedComponent) -> EmbeddedText:
        """Restore the column from the untrusted entries of a model file. Its network is not loaded yet."""
        embedding = ColumnEmbedding.restore(stored)
        raise_unless(embedding.record.modality == "text", "a text column whose encoder does not take texts")
        weight = stored.get_float("share", 1e-3, 1.0)
        return cls(embedding, Text.restore(stored), weight)
