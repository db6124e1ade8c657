"""The queue of rows to label, for clients (browser tabs) of the labelling page, and the thread that fits a network."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from torch import Tensor

from protonet._text import plural, to_printable
from protonet.commands.explain import MAX_EXPLANATION_COLUMNS
from protonet.embeddings.pictures.reading import text_to_path
from protonet.files.metadata import TrainingMetadata
from protonet.fit.active import Suggestion
from protonet.fit.diagnostics import MAX_BACKGROUND_ROWS, compute_column_contributions
from protonet.fit.uninformative import pad_class_counts
from protonet.network import PrototypeNetwork
from protonet.pipeline import TablePipeline
from protonet.report import project_logits
from protonet.server.labelling.answers import People
from protonet.server.labelling.class_names import validate_class_name
from protonet.server.labelling.label_file import LabelFile
from protonet.server.labelling.session import LabelSession, embed_or_standardize
from protonet.server.parsing import ParsedRows
from protonet.tables.training import TrainingTable
from protonet.ui.command_line import write_bug_report

#: Number of rows to label that are selected in advance, so that no client waits.
N_SUGGESTED_ROWS = 20
#: Limits of a response: most probable classes, similar labelled rows, points of the scatter plot, characters of a cell.
MAX_LIKELY_CLASSES, MAX_SIMILAR_ROWS, MAX_PLOTTED_ROWS, MAX_SHOWN_CHARACTERS = 9, 3, 100_000, 2000
#: Maximal number of rows in one response or one action.
MAX_SELECTED_ROWS = 200


@dataclass
class RowLease:
    """The reservation of a row for one client: the row is not suggested to other clients."""

    row: int  #: Index of the row.
    reason: str  #: Why the row was suggested, as a phrase.
    request_time: float  #: Time of the client's last request: `time.monotonic`, in seconds.
    is_second: bool = False  #: Whether another person has labelled the row, and this one is asked independently.


@dataclass
class LabelQueue:
    """Suggests rows to label to the clients of the labelling page, and saves the labels that they send.

    Methods that change labels must be called from one thread; `compute_scatter_plot` and `try_row` need not.
    """

    session: LabelSession  #: The table, its labels, and the network fitted last.
    flag_file: LabelFile  #: The file of rows that users flagged as unusual; such rows are not suggested again.
    people: People  #: Who gave each label, and the answers of others.
    column_names: Sequence[str]  #: The names of the table's columns.
    picture_column: int | None = None  #: Index of the column of picture paths; None if the table has no pictures.
    initial_model: TablePipeline | None = None  #: The model to start with, whose classes cannot be renamed, if any.
    n_changes: int = 0  #: Number of changes of labels or features since the start.
    missing_pictures: dict[int, str] = field(default_factory=dict)  #: Paths of lost pictures, by row index.
    _leases: dict[str, RowLease] = field(default_factory=dict)
    _suggestions: list[Suggestion] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _has_changed: threading.Event = field(default_factory=threading.Event)
    _is_closed: bool = False
    _embedding: Tensor = field(init=False)  #: Embeddings (rows, dim) by the session's network.
    _new_rows: TrainingTable | None = None  #: New features of all rows to which the network is not fitted yet, if any.

    def __post_init__(self) -> None:
        flagged = {tuple(cells) for *cells, _ in self.flag_file.rows}
        self.session.skipped |= {row for row, cells in enumerate(self.session.cells) if tuple(cells) in flagged}
        self.session.update_network(refit=True)
        self._embedding = embed_or_standardize(self.session.rows.x, self.session.network)
        self._suggestions = self.session.suggest(N_SUGGESTED_ROWS)

    @contextmanager
    def fit_in_background(self) -> Iterator[None]:
        """Start a thread that fits the network after each change of the labels; leaving the context ends the thread."""
        thread = threading.Thread(target=self._run_fit_loop, name="fitting")
        thread.start()
        try:
            yield
        finally:
            self._is_closed = True
            self._has_changed.set()
            thread.join()

    def suggest_row(self, client: str, person: str = "", *, second: bool = False) -> dict[str, object]:
        """Return the row that a client should label next; it stays the same until the client labels or skips it.

        If ``second``, rows that other people have labelled come first, until ``person`` has answered all of them. The
        dict has the keys of `progress` and `describe_row`, the ``reason`` for the suggestion, and ``second``: whether
        another person has labelled the row. If no row remains, it has the keys of `progress`, and ``row`` is None.
        """
        now = time.monotonic()
        lease = self._leases.get(client)
        cells, waits = self.session.cells, self.people.awaits_answer
        seconds = [row for row in self.session.labelled if waits(cells[row], person)] if second else []
        # Seconds since a client's last request, after which its unlabelled row is suggested to other clients.
        max_lease_seconds = 600.0
        if lease is None or not (lease.row in seconds if lease.is_second else self._needs_label(lease.row)):
            self._leases.pop(client, None)
            if seconds:
                reason = f"another person has labelled it; {plural(len(seconds), 'such row')} without your answer"
                lease = self._leases[client] = RowLease(seconds[0], reason, now, is_second=True)
                return self._describe_lease(lease)
            self._leases = {tab: old for tab, old in self._leases.items() if now - old.request_time < max_lease_seconds}
            leased = {other.row for other in self._leases.values()}
            with self._lock:
                self._suggestions = [item for item in self._suggestions if self._needs_label(item.row)]
                waiting = [suggestion for suggestion in self._suggestions if suggestion.row not in leased]
            if not waiting:  # if the thread has not suggested enough rows, take any
                left = self.session.list_unlabelled_rows().tolist()
                others = (row for row in left if row not in leased and self._needs_label(row))
                waiting = [Suggestion(row, "the next row of the table") for row in islice(others, 1)]
            if not waiting:
                return self.count_progress() | {"row": None}
            lease = self._leases[client] = RowLease(*waiting[0], now)
        lease.request_time = now
        return self._describe_lease(lease)

    def _describe_lease(self, lease: RowLease) -> dict[str, object]:
        """Return the answer of `suggest_row` for a reserved row."""
        row = self.describe_row(lease.row)
        if lease.is_second:  # probabilities of a model that knows the first answer would influence the second one
            row["likely"] = [{"name": name, "probability": None} for name in self.session.names[:MAX_LIKELY_CLASSES]]
        return self.count_progress() | {"reason": lease.reason, "second": lease.is_second} | row

    def label_row(self, client: str, row: int, name: str, person: str = "") -> None:
        """Save the class ``name`` as the label of a row, and the person who gave the label.

        If another person has labelled the row, the label remains, and both answers are kept. Raises an HTTPException if
        the row already has another label and the persons are not both known, and an OSError if the disk is full.
        """
        name = validate_class_name(name, self.session.names)
        if self._is_second(row, person):
            self.people.add_second_answer(self.session.cells[row], person, name, self.session.labels[row])
            with self._lock:
                self.session.add_class(name)
            self._leases.pop(client, None)
            return
        if self.session.labels.get(row) != name:  # else the request is repeated because its response was lost
            self._require_unlabelled(row)
            with self._lock:
                self.session.add_label(row, name)
                self.session.add_class(name)
                self.session.skipped.discard(row)
            self._wake_fit_thread(client)
        self.people.record_label(self.session.cells[row], person, name)

    def add_rows(self, cells: Sequence[list[str]], rows: TrainingTable) -> None:
        """Append new rows with the given cells to the table; ``rows`` has the features of all old and new rows."""
        with self._lock:
            self.session.cells.extend(cells)
            self.session.rows, network, embedding = rows, self.session.network, self._embedding
            if network is None:  # the new rows change how features are standardized
                self._embedding = embed_or_standardize(rows.x, None)
            else:
                self._embedding = torch.cat([embedding, embed_or_standardize(rows.x[len(embedding) :], network)])
        self._wake_fit_thread(None)

    def skip_row(self, client: str, row: int, person: str = "") -> None:
        """Skip a row without an answer of the person until the next start; the client is then offered another row."""
        if self._is_second(row, person):
            self.people.skip(self.session.cells[row], person)
        else:
            with self._lock:
                self.session.skipped.add(self._require_unlabelled(row))
        self._leases.pop(client, None)

    def flag_row(self, client: str, row: int) -> None:
        """Save a flag that an unlabelled row is unusual, and skip the row."""
        if not self._is_flagged(self._require_unlabelled(row)):
            self.flag_file.add(self.session.cells[row], "flagged")
        self.skip_row(client, row)

    def undo_label(self, client: str, row: int, shown_label: str | UnsetType | None = UNSET, person: str = "") -> None:
        """Undo the label, second answer, flag or skip of a row, and suggest the row to the client again.

        Raises an HTTPException if the row's label differs from ``shown_label``, the label on the client's page, which
        is None for an unlabelled row; UNSET omits this check.
        """
        cells = self.session.cells[self._require_row(row)]
        if self._is_second(row, person):
            self.people.remove_answer(cells, person)
            self._leases[client] = RowLease(row, "your answer was undone", time.monotonic(), is_second=True)
            return
        self._require_unchanged_label(row, shown_label)
        others = [line for line in self.flag_file.rows if line[:-1] != cells]
        if len(others) < len(self.flag_file.rows):
            self.flag_file.replace_rows(others)
        with self._lock:
            self.session.skipped.discard(row)
            if row in self.session.labelled:
                self.session.change_label(row, None)
                self.people.remove_answer(cells, self.people.get_person(cells))
        self._leases[client] = RowLease(row, "its label was undone", time.monotonic())
        self._wake_fit_thread(None)

    def change_label(self, row: int, name: str, person: str = "", shown_label: str | UnsetType | None = UNSET) -> None:
        """Change the label of a row to ``name``; raise an HTTPException if its label is not ``shown_label``."""
        name = validate_class_name(name, self.session.names)
        if self._require_row(row) not in self.session.labelled:
            raise HTTPException(409, f"`row` must be a labelled one; got {row}.")
        self._require_unchanged_label(row, shown_label)
        with self._lock:
            self.session.change_label(row, name)
            self.session.add_class(name)
        self._wake_fit_thread(None)
        self.people.change_label(self.session.cells[row], person, name)

    def label_rows(self, client: str, rows: Sequence[int], name: str | None, person: str = "") -> None:
        """Set the label of rows to ``name``; if it is None, flag them. Rows with a label or flag are not changed."""
        labelled = set(self.session.labelled)
        for row in [row for row in rows if self._require_row(row) not in labelled and not self._is_flagged(row)]:
            if name is None:
                self.flag_row(client, row)
            else:
                self.label_row(client, row, name, person)

    def add_class(self, name: str) -> None:
        """Add a class without labels."""
        with self._lock:
            self.session.add_class(validate_class_name(name, self.session.names))

    def rename_class(self, old: str, new: str) -> None:
        """Rename a class in all labels; if another class already has the new name, the two classes are merged."""
        session, names = self.session, self.session.names
        new = validate_class_name(new, names)
        if old not in names:
            raise HTTPException(404, f"`old` must be a class; got {to_printable(old)[:40]!r}.")
        if old in self.fixed_classes:
            raise HTTPException(409, f"`old` must be a class without a model; got {to_printable(old)[:40]!r}.")
        if old == new:
            return
        with self._lock:
            if session.rename_class(old, new):  # a merge, after which the indices of the classes have changed
                self._reset_network()
        self.people.rename_class(old, new)
        self._wake_fit_thread(None)

    def undo_rename(self, old: str, new: str) -> None:
        """Undo the last renaming of class ``old`` to ``new``; after a merge, rows with another label by now keep it.

        Raises an HTTPException if there was no such renaming since the start.
        """
        with self._lock:
            if not self.session.undo_rename(old, new):
                raise HTTPException(409, f"`old` must be a class that was renamed; got {to_printable(old)[:40]!r}.")
            self._reset_network()
        self.people.undo_rename(old, new)
        self._wake_fit_thread(None)

    def release_row(self, client: str) -> None:
        """End the reservation of a client's row, so that it can be suggested to other clients."""
        self._leases.pop(client, None)

    def count_progress(self) -> dict[str, object]:
        """Count the labelled, remaining and flagged rows and the labels per class; list pictures that do not exist."""
        counts = dict.fromkeys(self.session.names, 0) | Counter(name for *_, name in self.session.label_file.rows)
        left = self.session.list_unlabelled_rows().tolist()
        return {
            "answered": len(self.session.labelled),
            "left": sum(row not in self.missing_pictures for row in left) if self.missing_pictures else len(left),
            "flagged": len(self.flag_file.rows),
            "missing": list(self.missing_pictures.values()),
            "classes": [{"name": name, "rows": rows} for name, rows in counts.items()],
        }

    @torch.no_grad()
    def describe_row(self, row: int) -> dict[str, object]:
        """Return the cells of a row, its most probable classes (``likely``) and the most similar labelled rows."""
        names = self.session.names
        with self._lock:
            network, rows, embedding = self.session.network, self.session.rows, self._embedding
        values = [] if network is None else self._predict(network, rows, torch.tensor([row]))[0].softmax(dim=0).tolist()
        probabilities = dict(zip(names, values, strict=False))
        likely = [{"name": name, "probability": probabilities.get(name)} for name in names]
        likely.sort(key=lambda item: -probabilities.get(str(item["name"]), 0.0))
        near = self.list_similar_rows(embedding[row], excluded_row=row)
        return self.row_to_dict(row) | {"likely": likely[:MAX_LIKELY_CLASSES], "near": near}

    def list_similar_rows(self, embedding: Tensor, *, excluded_row: int = -1) -> list[dict[str, object]]:
        """Return the labelled rows, except ``excluded_row``, whose embeddings are nearest to an embedding (dim,)."""
        with self._lock:
            labels, others = self.session.labels, self._embedding
        labels.pop(excluded_row, None)
        if not labels or others.shape[1] != len(embedding):
            return []
        done = list(labels)
        distances = torch.linalg.vector_norm(others[done] - embedding, dim=1)
        nearest = [done[index] for index in distances.argsort(stable=True)[:MAX_SIMILAR_ROWS].tolist()]
        return [self.row_to_dict(row) | {"name": labels[row]} for row in nearest]

    def row_to_dict(self, row: int) -> dict[str, object]:
        """Return the index of a row, its cells, each truncated to a maximal length, and whether its picture exists."""
        cells = [cell[:MAX_SHOWN_CHARACTERS] for cell in self.session.cells[row]]
        return {"row": row, "cells": cells, "picture": self.has_picture(row)}

    @torch.no_grad()
    def compute_scatter_plot(self) -> dict[str, object]:
        """Compute the points of a scatter plot of rows, by projecting logits to two dimensions.

        Returns:
            Lists with an item per point: ``row``, the row index; ``x`` and ``y``, coordinates in [-1, 1]; ``predicted``
            and ``label``, class indices, where the label of an unlabelled row is -1. ``names`` are the classes.
        """
        network, rows = self._require_network("map")
        shown = torch.arange(0, len(rows.x), -(-len(rows.x) // MAX_PLOTTED_ROWS))
        logits = self._predict(network, rows, shown)
        x, y = project_logits(logits).T.tolist()
        with self._lock:
            labels = dict(self.session.list_label_indices())
        return {
            "row": shown.tolist(),
            "x": [round(value, 3) for value in x],
            "y": [round(value, 3) for value in y],
            "predicted": logits.argmax(dim=1).tolist(),
            "label": [labels.get(row, -1) for row in shown.tolist()],
            "names": list(self.session.names),
        }

    @torch.no_grad()
    def try_row(self, model: TablePipeline, row: ParsedRows) -> dict[str, object]:
        """Classify one row, entered by a user, with the result of `build_model`, and explain the prediction.

        Returns:
            ``likely``: the most probable classes with their probabilities; ``near``: the most similar labelled rows;
            ``farther``: the fraction of the table's rows that are farther from every class than this row; ``support``:
            the contribution of each column to the log-probability of the most probable class; [] for a single column.
        """
        with self._lock:
            x_all, done = self.session.rows.x, self.session.labelled[-MAX_BACKGROUND_ROWS:]
        names, sizes = model.column_names, model.n_features_per_column
        logits = model.predict_logits(row.x, row.uninformative_mask)[0]
        x = torch.from_numpy(model.fill_gaps(row.x))
        values, order = (part.tolist() for part in logits.softmax(dim=0).sort(descending=True, stable=True))
        pairs = zip(order[:MAX_LIKELY_CLASSES], values, strict=False)
        likely = [{"name": model.classes[at], "probability": value} for at, value in pairs]
        some = x_all[:: -(-len(x_all) // 1024)]
        farther = float((model.network(some).amax(dim=1) < logits.amax()).double().mean())
        support: list[dict[str, object]] = []
        if len(sizes) > 1:
            weights = torch.ones(len(done))
            scores = compute_column_contributions(model.network, x[0], order[0], x_all[done], weights, sizes)
            top = scores.abs().argsort(descending=True, stable=True)[:MAX_EXPLANATION_COLUMNS].tolist()
            support = [{"name": names[at], "support": float(scores[at])} for at in top]
        near = self.list_similar_rows(model.network.embed(x)[0])
        return {"likely": likely, "near": near, "farther": farther, "support": support}

    def build_model(self) -> TablePipeline:
        """Build a model with the network that was fitted last; raise an HTTPException if no network is fitted yet."""
        return self._build_pipeline(*self._require_network("model"))

    def _build_pipeline(self, network: PrototypeNetwork, rows: TrainingTable) -> TablePipeline:
        """Build a model from a network; its metadata have the number of labelled rows of each class without cells."""
        names = tuple(self.session.names[: len(network.counts)])
        metadata = TrainingMetadata() if self.initial_model is None else self.initial_model.metadata
        counts = pad_class_counts(metadata.uninformative_counts, len(names))
        for row, label in self.session.list_label_indices():
            if rows.uninformative_mask[row] and label < len(names):
                counts[label] += 1
        metadata = replace(metadata, uninformative_counts=tuple(counts.tolist()))
        return TablePipeline(
            network=network, classes=names, columns=rows.columns, metadata=metadata, encoding=rows.encoding
        )

    def _predict(self, network: PrototypeNetwork, rows: TrainingTable, indices: Tensor) -> Tensor:
        """Compute logits (n, num_classes) of rows ``indices`` (n,); rows without any cell get the class frequencies."""
        logits = torch.cat([network(part) for part in rows.x[indices].split(4096)])
        mask = rows.uninformative_mask[indices]
        by_frequency = self._build_pipeline(network, rows).uninformative_logits if bool(mask.any()) else None
        if by_frequency is not None:
            logits[mask] = by_frequency.to(logits)
        return logits

    @property
    def fixed_classes(self) -> Sequence[str]:
        """The names of the classes that cannot be renamed: those of the initial model, if there is one."""
        return () if self.initial_model is None else tuple(map(str, self.initial_model.classes))

    @property
    def latest_rows(self) -> TrainingTable:
        """The latest features of all rows; the current network may have been fitted to earlier features."""
        return self._new_rows or self.session.rows

    def replace_rows(self, rows: TrainingTable) -> None:
        """Replace the features of all rows; the background thread then fits the network to the new features."""
        self._new_rows = rows
        self._wake_fit_thread(None)

    def _require_network(self, purpose: str) -> tuple[PrototypeNetwork, TrainingTable]:
        """Return the network and the table; if no network is fitted, raise an HTTPException that names ``purpose``."""
        with self._lock:
            network, rows = self.session.network, self.session.rows
        if network is None and len({*self.session.labels.values()}) > 1:  # classes or columns have just been changed
            raise HTTPException(409, "The model is being fitted. Try again in a few seconds.", {"retry-after": "1"})
        if network is None:
            raise HTTPException(409, f"`{purpose}` needs labels of two classes. Label more rows.")
        return network, rows

    def _require_unchanged_label(self, row: int, shown_label: str | UnsetType | None) -> None:
        """Raise an HTTPException if a row's label is not ``shown_label``, the label on the client's page, or UNSET."""
        label = self.session.labels.get(row)
        if shown_label is not UNSET and shown_label != label:
            got = "no label any more" if label is None else f"the label {to_printable(label)[:40]!r} now"
            raise HTTPException(409, f"`row` must not have been changed elsewhere; {row} has {got}.")

    def _is_second(self, row: int, person: str) -> bool:
        """Test whether an answer of this person to a row would be a second one, after that of another person."""
        cells = self.session.cells[self._require_row(row)]
        return self.people.has_other(cells, person) and row in self.session.labelled

    def _is_flagged(self, row: int) -> bool:
        """Test whether a row is flagged."""
        return [*self.session.cells[row], "flagged"] in self.flag_file.rows

    def _needs_label(self, row: int) -> bool:
        """Test whether a row still needs a label: it is neither skipped nor labelled, and its picture exists."""
        if row in self.session.skipped or row in self.session.labelled:
            return False
        if not self.has_picture(row):
            self.missing_pictures[row] = self.session.cells[row][self.picture_column or 0]
            return False
        self.missing_pictures.pop(row, None)
        return True

    def has_picture(self, row: int) -> bool:
        """Test whether the picture of a row exists; true if rows have no pictures."""
        return self.picture_column is None or text_to_path(self.session.cells[row][self.picture_column]).exists()

    def _reset_network(self) -> None:
        """Discard the fitted network, because the classes have changed; the initial model, if any, stays in use."""
        if self.initial_model is not None:
            self.session.network = None
        else:
            self.session.replace_rows(self.session.rows)

    def _require_unlabelled(self, row: int) -> int:
        """Return a row index unchanged; raise an HTTPException if the row already has a label, or does not exist."""
        if self._require_row(row) in self.session.labelled:
            raise HTTPException(409, f"`row` must be unlabelled; got {row}, which another client has labelled.")
        return row

    def _require_row(self, row: int) -> int:
        """Return a row index unchanged; raise an HTTPException unless this row exists and may be labelled."""
        if not 0 <= row < len(self.session.cells) or self.session.rows.has_label[row]:
            raise HTTPException(404, f"`row` must be an unlabelled row of the table; got {row}.")
        return row

    def _wake_fit_thread(self, client: str | None) -> None:
        """Wake the thread that fits the network to changed labels; release the row that ``client`` reserved, if any."""
        if client is not None:
            self._leases.pop(client, None)
        self.n_changes += 1
        self._has_changed.set()

    def _run_fit_loop(self) -> None:
        """Fit the network whenever labels or features have changed, until the context of `fit_in_background` ends."""
        fitted = len(self.session.labelled)
        labels_per_refit = 5  # new labels after which the network is fitted again; an initial model never is
        while True:
            self._has_changed.wait()
            if self._is_closed:
                return
            self._has_changed.clear()
            try:
                if (rows := self._new_rows) is not None:
                    fitted, embedding = 0, embed_or_standardize(rows.x, None)
                    with self._lock:
                        self.session.replace_rows(rows)
                        self._embedding, self._new_rows = embedding, None if self._new_rows is rows else self._new_rows
                with self._lock:
                    answers, left = self.session.list_label_indices(), self.session.list_unlabelled_rows()
                    names = list(self.session.names)
                anew = abs(len(answers) - fitted) >= labels_per_refit
                network = self.session.fit_network(answers, len(names), refit=anew)
                fitted = len(answers) if anew else fitted
                embedding = embed_or_standardize(self.session.rows.x, network)
                with self._lock:
                    if self.session.names[: len(names)] != names:  # classes were renamed in the meantime
                        self._reset_network()
                        continue
                    if len(embedding) != len(self.session.cells):  # rows were added in the meantime
                        continue
                    self.session.network, self._embedding = network, embedding
                chosen = self.session.suggest(N_SUGGESTED_ROWS, left)
                with self._lock:
                    self._suggestions = chosen
            except Exception as error:  # the old network stays in use; no label is lost
                print(write_bug_report("protonet page", error), file=sys.stderr)
