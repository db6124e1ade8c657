"""The session of the labelling page, which fits a network to the labels and suggests rows to label."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from protonet._text import to_printable
from protonet.errors import raise_input_error
from protonet.fit.active import Standardiser, Suggestion, suggest_rows
from protonet.fit.solver import fit_solution
from protonet.network import PrototypeNetwork
from protonet.pipeline import TablePipeline
from protonet.server.labelling.label_file import LabelFile
from protonet.tables.training import TrainingTable

#: Number of typical rows per class that are suggested first, before uncertain rows.
TYPICAL_ROWS_PER_CLASS = 2


class LabelSession:
    """A labelling session: a table, the labels of its rows, and the network that is fitted to the labels.

    The label file has cells, but no row indices. Each line belongs to a row of the table with equal cells. If several
    rows have equal cells, their lines belong to the first of these rows; rows with labels in the table come last.

    Args:
        rows: The features of all rows of the table.
        cells: The texts of the cells of each row.
        classes: The class names to start with. With a model, the names of its classes are used instead.
        model: The model that labels update; None to fit a network to the labels alone.
        label_file: The label file.
    """

    def __init__(
        self,
        rows: TrainingTable,
        cells: list[list[str]],
        classes: list[str],
        model: TablePipeline | None,
        label_file: LabelFile,
    ) -> None:
        self.rows, self.cells, self.classes, self.label_file = rows, cells, classes, label_file
        self.names = classes if model is None else list(map(str, model.classes))
        self.skipped: set[int] = set()
        # Each renaming since the start: old and new name, index of the old one, and, after a merge, its rows.
        self._renames: list[tuple[str, str, int, set[int] | None]] = []
        self._fitted, self._learned = None if model is None else model.network, list[tuple[int, int]]()
        self._refits = model is None
        rows_of: dict[tuple[str, ...], list[int]] = {}
        for row in sorted(range(len(cells)), key=lambda row: (bool(rows.has_label[row]), row), reverse=True):
            rows_of.setdefault(tuple(cells[row]), []).append(row)
        self.labelled: list[int] = []  #: Indices of the labelled rows, in the order of the label file.
        for *values, name in label_file.rows:
            if not rows_of.get(tuple(values)):
                got = f"a label {name!r} of a row that is not in it"
                raise_input_error("table", "be the table of the labels", got, "Pass another --output.")
            self.labelled.append(rows_of[tuple(values)].pop())
        self.network: PrototypeNetwork | None = None  #: The network fitted last; None before two classes have labels.

    @property
    def labels(self) -> dict[int, str]:
        """The label of each labelled row by its index, in the order of the label file."""
        return {row: label for row, (*_, label) in zip(self.labelled, self.label_file.rows, strict=True)}

    def update_network(self, *, refit: bool = False) -> None:
        """Update the network with new labels, by `fit_network`."""
        self.network = self.fit_network(self.list_label_indices(), len(self.names), refit=refit)

    def replace_rows(self, rows: TrainingTable) -> None:
        """Replace the features of all rows, and discard the network."""
        self.rows, self.network, self._fitted, self._learned = rows, None, None, []

    def list_label_indices(self) -> list[tuple[int, int]]:
        """List the pair (row index, class index) of each label, in the order of the label file."""
        return [(row, self.names.index(label)) for row, label in self.labels.items()]

    def fit_network(self, labels: list[tuple[int, int]], num_classes: int, *, refit: bool) -> PrototypeNetwork | None:
        """Return a network that is fitted to labels, by adding them to the prototypes of the last fit, or by a new fit.

        The labels are pairs (row index, class index). ``refit`` has no effect on an initial model; without one, a
        change of earlier labels or classes also needs a new fit. Returns a copy, or None before two classes have
        labels.
        """
        x = self.rows.x[[row for row, _ in labels]]
        y = torch.tensor([label for _, label in labels], dtype=torch.int64)
        fitted = self._fitted
        merged = fitted is None or len(fitted.counts) > num_classes
        if self._refits and (refit or merged or self._learned != labels[: len(self._learned)]):
            self._fitted, self._learned = None, labels
            if len(y.unique()) > 1:
                encoding = self.rows.encoding
                column_indices = None if encoding is None else encoding.feature_block_indices
                self._fitted = fit_network_to_labels(x, y, num_classes, column_indices)
        network, first = deepcopy(self._fitted), len(self._learned)
        if network is not None and len(y) > first:
            network.add_samples(x[first:], y[first:], num_classes=num_classes)
        return network

    def list_unlabelled_rows(self) -> Tensor:
        """Return the indices (n,) int64 of the rows that are neither labelled nor skipped."""
        left = ~self.rows.has_label
        left[[*self.labelled, *self.skipped]] = False
        return left.nonzero().flatten()

    def suggest(self, n: int, candidates: Tensor | None = None) -> list[Suggestion]:
        """Suggest ``n`` rows to label next: at first typical rows of the table, later the most informative rows.

        Fewer rows are returned if fewer remain, and more until the first typical rows are labelled. ``candidates`` (m,)
        are the indices of unlabelled rows; None to compute them. Uninformative rows are not suggested.
        """
        candidates = self.list_unlabelled_rows() if candidates is None else candidates
        candidates = candidates[~self.rows.uninformative_mask[candidates]]
        first = TYPICAL_ROWS_PER_CLASS * len(self.classes) - len(self.labelled)
        if not len(candidates):
            return []
        network = None if self._refits and first > 0 else self.network
        n = min(len(candidates), n if network is not None else max(n, first))
        return suggest_rows(network, self.rows.x, n, list(map(to_printable, self.names)), unlabelled_rows=candidates)

    def add_class(self, name: str) -> None:
        """Append a name to the list of classes, unless the list has it."""
        if name not in self.names:
            self.names.append(name)

    def add_label(self, row: int, name: str) -> None:
        """Add the label of a row to the file."""
        self.label_file.add(self.cells[row], name)
        self.labelled.append(row)

    def change_label(self, row: int, name: str | None) -> None:
        """Change the label of a row in the file; None removes the label."""
        at, rows = self.labelled.index(row), list(self.label_file.rows)
        rows[at : at + 1] = [] if name is None else [[*self.cells[row], name]]
        self.label_file.replace_rows(rows)
        if name is None:
            del self.labelled[at]

    def rename_class(self, old: str, new: str) -> bool:
        """Rename a class in all labels; if the new name is a class, merge the two; return whether they were merged."""
        merged, names, labels = new in self.names, self.names, self.labels
        self._set_names([new if name == old else name for name in labels.values()])
        rows = {row for row, name in labels.items() if name == old} if merged else None
        self._renames.append((old, new, names.index(old), rows))
        names[:] = [new if name == old else name for name in names if not (merged and name == old)]
        return merged

    def undo_rename(self, old: str, new: str) -> bool:
        """Undo the last renaming of class ``old`` to ``new``; return False if there was none, or ``new`` is gone."""
        index = next((at for at, entry in reversed([*enumerate(self._renames)]) if entry[:2] == (old, new)), None)
        if index is None or new not in self.names:
            return False
        *_, place, merged_rows = self._renames.pop(index)
        is_old = [name == new and (merged_rows is None or row in merged_rows) for row, name in self.labels.items()]
        self._set_names([old if back else name for back, name in zip(is_old, self.labels.values(), strict=True)])
        others = [name for name in self.names if name != old and (merged_rows is not None or name != new)]
        self.names[:] = [*others[:place], old, *others[place:]]
        return True

    def _set_names(self, names: Sequence[str]) -> None:
        """Replace the label of each row in the file."""
        lines = zip(self.label_file.rows, names, strict=True)
        self.label_file.replace_rows([[*cells, name] for (*cells, _), name in lines])


@torch.no_grad()
def embed_or_standardize(x: Tensor, network: PrototypeNetwork | None) -> Tensor:
    """Compute the embeddings (n, dim) of rows (n, features) by a network; if it is None, standardize the features."""
    space = Standardiser(x) if network is None else network
    return torch.cat([space.embed(batch) for batch in x.split(4096)])


def fit_network_to_labels(x: Tensor, y: Tensor, num_classes: int, column_indices: Tensor | None) -> PrototypeNetwork:
    """Fit a network to rows (n, dim) and class indices (n,) of at least two classes.

    ``column_indices`` (dim,) has the index of the column that each feature encodes; None if features are columns.
    """
    metadata, max_seconds = {"num_classes": num_classes}, 5.0  # a user waits for better suggestions
    return fit_solution([(x, y)], None, metadata, max_seconds, column_indices=column_indices).network
