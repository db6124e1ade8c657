"""The protocol of columns: all that a kind of column has to say for itself.

A kind is a class whose instances are columns as they were fitted: frozen, with all that it takes to turn the cells of
new rows into numbers, never with a label. A new kind is one file with one such class, a line in
`protonet.tables.columns.encoding.KINDS`, and what it is recognised by in `protonet.tables.columns.recognise`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Protocol

import numpy as np

from protonet.views.view import Graph, Stored


class Column(Protocol):
    """A fitted column. Its cells come as an array (n,): text without spaces around it, numbers, or datetime64."""

    kind: ClassVar[str]  #: Its name in model files, messages and options.

    @property
    def parts(self) -> tuple[str, ...]:
        """What is told by each of the numbers that a cell becomes, to be put behind the column's name."""

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """Return (n, parts) float32, of a total variance of about 1 over the rows of fit. Gaps are no error."""

    def find_strange(self, cells: np.ndarray) -> np.ndarray:
        """Return which cells (n,) are no gaps, and nothing that fit has seen: another kind, an unknown category."""

    def tell(self) -> str:
        """Return what people read of it."""

    def describe(self) -> dict[str, Any]:
        """Return all of it but tensors, as JSON can hold it."""

    def tensors(self) -> dict[str, np.ndarray]:
        """Return its tensors by name, float32."""

    @classmethod
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
            The name of the numbers (n, parts) FLOAT, or None where ONNX cannot.
        """


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
