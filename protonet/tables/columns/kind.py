"""What a kind of column has to say for itself: all that the rest of the library asks of columns is here.

A kind is a class whose instances are columns as they were fitted: frozen, with all that it takes to turn the cells of
new rows into numbers, never with a label. A new kind is one file with one such class, a line in
`protonet.tables.columns.encoding.KINDS`, and what it is recognised by in `protonet.tables.columns.recognise`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from protonet.representations.representation import Record, Representation
from protonet.tables.columns.parsing import find_gaps, write_cells
from protonet.views.view import Graph, Stored

Find = Callable[[Record], Representation]  #: Opens what a model file has the record of.


class Column(ABC):
    """A fitted column. Its cells come as an array (n,): text without spaces around it, numbers, or datetime64."""

    kind: ClassVar[str]  #: Its name in model files, messages and options.
    takes: ClassVar[str | None] = None  #: What a representation has to take to read it: "text", "picture" or nothing.
    names_sources: ClassVar[bool] = True  #: Whether its cells may name what rows come from, such as persons.
    most_strange: ClassVar[float] = 0.5  #: The share of the cells that `find_strange` may find, at the most.
    drowns: ClassVar[bool] = False  #: Whether other columns need views of their own beside it, not to drown.

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """What is told by each of the numbers that a cell becomes, to be put behind the column's name."""

    @property
    def plain(self) -> bool:
        """Whether it holds numbers without gaps, which may stay as they are."""
        return False

    @property
    def rare(self) -> float:
        """The share of the rows of fit whose cells `find_others` finds."""
        return 0.0

    @property
    def blocks(self) -> list[int]:
        """How many features count as one thing where features are made alike."""
        return [len(self.parts)]

    @property
    def alone(self) -> list[int]:
        """How many features each part has that views may take alone."""
        return []

    @property
    def read_by(self) -> Record | None:
        """What others have learned reads it, if something does."""
        return None

    def attach(self, find: Find, *, shown: bool) -> Column:
        """Return it with what reads it, if something does, and whether progress is shown."""
        return self

    def read_names(self, texts: np.ndarray) -> np.ndarray | None:
        """Return what classes are called (n,) as the first of the features; None where nothing reads them."""
        return None

    def read_once(self, cells: np.ndarray) -> np.ndarray:
        """Return cells (n,) in a form that is looked at several times with less work."""
        return cells

    def read_numbers(self, cells: np.ndarray) -> np.ndarray | None:
        """Return cells (n,) as float64 in an order that means something, NaN for gaps; None where there is none."""
        return None

    def fill(self, cells: np.ndarray) -> np.ndarray:
        """Return cells (n,) as values to compare: floats where they are in an order, gaps filled; otherwise texts."""
        return write_cells(cells).astype(str)

    @abstractmethod
    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return (n, parts) float32, of a total variance of about 1 over the rows of fit. Gaps are no error."""

    def find_strange(self, cells: np.ndarray) -> np.ndarray:
        """Return which cells (n,) are no gaps, and nothing that fit has seen: another kind, an unknown category."""
        return np.zeros(len(cells), bool)

    def find_others(self, cells: np.ndarray) -> np.ndarray:
        """Return which cells (n,) have no number of their own: rare ones, and such as fit never saw."""
        return np.zeros(len(cells), bool)

    def find_uninformative(self, cells: np.ndarray) -> np.ndarray:
        """Return which cells (n,) bool say nothing: missing ones, and those that are read as missing."""
        numbers = self.read_numbers(cells)
        missing = find_gaps(cells) | self.find_strange(cells) if numbers is None else np.isnan(numbers)
        return np.asarray(missing, bool)

    def describe_respelled(self, cells: np.ndarray) -> str:
        """Return the first of cells (n,) that is known in another spelling alone, and what it is; "" for none."""
        return ""

    @property
    def strange(self) -> str:
        """What people read of a cell that `find_strange` finds."""
        return f"not a {self.kind}, taken for a gap"

    @abstractmethod
    def tell(self) -> str:
        """Return what people read of it."""

    def write(self, value: float) -> str:
        """Return a number of `read_numbers` as people read it."""
        return f"{value:.4g}"

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return all of it but tensors, as JSON can hold it."""

    def tensors(self) -> dict[str, np.ndarray]:
        """Return its tensors by name, float32."""
        return {}

    @classmethod
    @abstractmethod
    def restore(cls, stored: Stored) -> Column:
        """Build a column again from a description and tensors that may say anything.

        Raises:
            ValueError: They are none; the reason in a few words.
        """

    def add_to_graph(self, graph: Graph, cells: str) -> str | None:
        """Add it to an ONNX graph.

        Args:
            graph: Where to.
            cells: The value that holds the cells (n, 1): DOUBLE with NaN for gaps, or STRING where it is a category.

        Returns:
            The name of the numbers (n, parts) FLOAT, or None where ONNX cannot, which knows no dates, files or parts of
            words.
        """
        return None


def tell_gaps(gaps: np.ndarray, share: float) -> list[np.ndarray]:
    """Return, as a list of one, gaps (n,) as a number of unit variance, given their share of the rows of fit.

    The list is empty where they told nothing: if there were none, or nothing else.
    """
    return [(gaps - share) / math.sqrt(share * (1 - share))] if 0 < share < 1 else []


def name_gaps(share: float) -> tuple[str, ...]:
    """Return the names of what `tell_gaps` returns."""
    return (" missing",) if 0 < share < 1 else ()


def write_share(share: float) -> str:
    """Return a share of gaps for people: ", 12 % missing", or nothing where there are none."""
    return f", {100 * share:.2g} % missing" if share else ""
