"""``protonet label``: label rows in the terminal, the most informative ones first."""

from __future__ import annotations

import argparse
import math
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor

from protonet._text import to_printable
from protonet.commands.answers import Answers
from protonet.commands.data import UnlabelledTable, read_cells, read_unlabelled
from protonet.commands.models import get_label_column, open_model, show_notes, suggest
from protonet.errors import raise_input_error
from protonet.files import Model
from protonet.fit.active import Standardised, Suggestion
from protonet.fit.solver import solve_problem
from protonet.network import PrototypeNetwork
from protonet.tables.delimited import MISSING_TEXTS
from protonet.ui.text import count

#: The keys of the classes, in order, and of other actions.
KEYS = "123456789abcdefghijklmnoprtvwxyz"
SKIP, UNDO, LEAVE = "s", "u", "q"
#: The number of rows chosen at a time, before the next refit.
BATCH = 5
#: The number of typical rows per class to label before uncertainty is used.
FIRST = 2
#: The maximal rows for the mean confidence, and the number of latest labels for the accuracy.
SAMPLE, LATEST = 1024, 20
#: The maximal number of characters shown of a cell, and of a class name.
MAX_CELL_LENGTH, MAX_NAME_LENGTH = 300, 100
#: The time limit of a refit, s.
TIME_LIMIT = 5.0


def run(options: argparse.Namespace) -> None:
    """Ask for the labels of rows until all are labelled or the user quits.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        KeyboardInterrupt: After Ctrl-C; all labels are saved.
        OSError: The labels cannot be written.
        InputError: Arguments, model, table and labels do not match; there is no terminal.
    """
    output = options.outputs["output"]
    model = None if options.model is None else open_model(options, argument="--model")
    classes = parse_classes(options.classes, model)
    label = get_label_column(options.label, model)
    rows = read_unlabelled(options, model, label)
    header, cells = read_cells(options, model, label)
    show_notes(rows.table, quiet=options.quiet)
    with Answers(output, [*header, label], classes) as answers:
        session = Session(rows, cells, classes, model, answers)
        try:
            with open_keys() as ask_key:
                ask(session, header, ask_key)
        except KeyboardInterrupt:
            saved = f"stopped; {count(len(answers.rows), 'label')} in {output}. The same command continues."
            raise KeyboardInterrupt(saved) from None
    print(f"{count(len(answers.rows), 'label')} in {output}: the same command continues; fit and update read the file")


def parse_classes(text: str | None, model: Model | None) -> list[str]:
    """Parse the names of the classes; the default are the model's.

    Raises:
        InputError: There are no names, too few or too many; a name is repeated, means a missing value, or is unknown to
            the model.
    """
    if text is None and model is None:
        raise_input_error("--classes", "name the classes", "none", "Pass --classes cat,dog, or --model FILE.")
    known = [] if model is None else list(map(str, model.classes))
    names = known if text is None else [name.strip() for name in text.split(",")]
    min_classes = 1 if known else 2
    if not min_classes <= len(names) <= len(KEYS):
        must = f"be {min_classes} to {len(KEYS)} names, one key each"
        raise_input_error("--classes", must, len(names), "Separate them by commas.")
    for name in names:
        if name.lower() in MISSING_TEXTS or names.count(name) > 1:
            must = "be different names, not a missing value"
            raise_input_error("--classes", must, repr(name), "Separate other names by commas.")
        if known and name not in known:
            got = f"{name!r}, and it knows {', '.join(known[:10])}{' ...' if len(known) > 10 else ''}"
            remedy = "Name those, or leave out --model; protonet update adds classes afterwards."
            raise_input_error("--classes", "be classes that the model knows", got, remedy)
    return names


def check_class(name: object, known: Sequence[str]) -> str:
    """Validate the name of a class, and strip spaces.

    Raises:
        InputError: The name means a missing value, is too long, or is not printable.
    """
    text = name.strip() if isinstance(name, str) else ""
    if text in known:
        return text
    if text.lower() in MISSING_TEXTS or len(text) > MAX_NAME_LENGTH or not text.isprintable():
        must = f"be a printable name of up to {MAX_NAME_LENGTH} characters that is no missing value"
        raise_input_error("name", must, repr(text[:40]), "Type another one.")
    return text


class Session:
    """A labelling session: the rows, their labels so far, and the network fitted to them.

    Args:
        rows: The encoded rows.
        cells: The cells of each row, as text.
        classes: The classes that have a key.
        model: The initial model, or None.
        answers: The labelled rows so far. Each is assigned to a row with equal cells: of several, to the first one
            without a label in the table.

    Raises:
        InputError: A labelled row is not in the table.
    """

    def __init__(
        self,
        rows: UnlabelledTable,
        cells: Sequence[list[str]],
        classes: list[str],
        model: Model | None,
        answers: Answers,
    ) -> None:
        self.rows, self.cells, self.classes, self.answers = rows, cells, classes, answers
        self.names = classes if model is None else list(map(str, model.classes))
        self.skipped: set[int] = set()
        self._fitted, self._learned = None if model is None else model.network, list[tuple[int, int]]()
        self._refits = model is None
        rows_of: dict[tuple[str, ...], list[int]] = {}
        for row in sorted(range(len(cells)), key=lambda row: (bool(rows.known[row]), row), reverse=True):
            rows_of.setdefault(tuple(cells[row]), []).append(row)
        self.done: list[int] = []  #: The index of each labelled row.
        for *values, name in answers.rows:
            if not rows_of.get(tuple(values)):
                got = f"a label {name!r} of a row that is not in it"
                raise_input_error("table", "be the table of the labels", got, "Pass another --output.")
            self.done.append(rows_of[tuple(values)].pop())
        self._steps = list(self.done)  # the rows in the order in which they were labelled or skipped
        self.right: list[bool | None] = [None] * len(self.done)
        """Whether the network predicted each label; None for those without a network, or of an earlier session."""
        self.network: PrototypeNetwork | None = None  #: The result of `learn`.

    def learn(self, *, anew: bool = False) -> None:
        """Update the network: new labels move the prototypes or, without a model and if ``anew``, all are refitted."""
        self.network = self.make_network(self.list_answers(), anew=anew)

    def replace_rows(self, rows: UnlabelledTable) -> None:
        """Replace the features of the same rows, and discard the network."""
        self.rows, self.network, self._fitted, self._learned = rows, None, None, []

    def list_answers(self) -> list[tuple[int, int]]:
        """List the row and the class index of each label."""
        return [(row, self.names.index(cells[-1])) for row, cells in zip(self.done, self.answers.rows, strict=True)]

    def make_network(self, answers: list[tuple[int, int]], *, anew: bool) -> PrototypeNetwork | None:
        """Fit or update a network; None until two classes have labels."""
        x = self.rows.x[[row for row, _ in answers]]
        y = torch.tensor([label for _, label in answers], dtype=torch.int64)
        if self._refits and (anew or self._fitted is None or self._learned != answers[: len(self._learned)]):
            self._fitted, self._learned = None, answers
            if len(y.unique()) > 1:
                self._fitted = fit_answers(x, y, len(self.names), self.rows.blocks)
        network, first = deepcopy(self._fitted), len(self._learned)
        if network is not None and len(y) > first:
            network.add_samples(x[first:], y[first:], num_classes=len(self.names))
        return network

    def list_left(self) -> Tensor:
        """List the rows (n,) int64 without a label that were not skipped."""
        left = ~self.rows.known
        left[[*self.done, *self.skipped]] = False
        return left.nonzero().flatten()

    def choose(self, n: int = BATCH, left: Tensor | None = None) -> list[Suggestion]:
        """Choose at least ``n`` rows to label next: first typical ones, then the most informative ones."""
        left, first = self.list_left() if left is None else left, FIRST * len(self.classes) - len(self.done)
        if not len(left):
            return []
        network = None if self._refits and first > 0 else self.network
        n = min(len(left), n if network is not None else max(n, first))
        return suggest(network, self.rows.x, n, list(map(to_printable, self.names)), rows=left)

    def answer(self, row: int, name: str) -> None:
        """Save a label, and update the network."""
        self.keep(row, name)
        self.learn()

    @torch.no_grad()
    def keep(self, row: int, name: str) -> None:
        """Save a label."""
        self.answers.add(self.cells[row], name)
        guess = None if self.network is None else self.names[int(self.network(self.rows.x[[row]]).argmax())]
        self.right.append(None if guess is None else guess == name)
        self.done.append(row)
        self._steps.append(row)

    def change(self, row: int, name: str | None) -> None:
        """Change the label of a row, or remove it."""
        at, rows = self.done.index(row), list(self.answers.rows)
        rows[at : at + 1] = [] if name is None else [[*self.cells[row], name]]
        self.answers.change(rows)
        if name is None:
            del self.done[at], self.right[at]
            self._steps.remove(row)

    def skip(self, row: int) -> None:
        """Skip a row in this session."""
        self.skipped.add(row)
        self._steps.append(row)

    def undo(self) -> Suggestion | None:
        """Undo the last label or skip; return its row and what was undone, or None."""
        if not self._steps:
            return None
        row = self._steps.pop()
        if row in self.skipped:
            self.skipped.remove(row)
            return Suggestion(row, "undone: it was skipped")
        *_, name = self.answers.undo()
        self.right.pop()
        self.done.pop()
        self.learn()
        return Suggestion(row, f"undone: it was labelled {to_printable(name)}")

    @torch.no_grad()
    def summary(self) -> str:
        """Summarize the mean confidence on unlabelled rows, and the accuracy on the latest labels."""
        left = self.list_left()
        if self.network is None:
            return "no model yet: two classes need labels"
        if not len(left):
            return "all rows are labelled"
        some = left[:: math.ceil(len(left) / SAMPLE)]
        confidence = float(self.network(self.rows.x[some]).softmax(dim=1).amax(dim=1).mean())
        text = f"mean predicted probability {100 * confidence:.0f} % on {count(len(left), 'unlabelled row')}"
        latest = [right for right in self.right if right is not None][-LATEST:]
        if latest:
            text += f"; {sum(latest)} of your last {len(latest)} labels were predicted correctly"
        return text


@torch.no_grad()
def embed(rows: UnlabelledTable, network: PrototypeNetwork | None) -> Tensor:
    """Compute the embeddings (n, dim) of all rows; without a network, the standardized features."""
    space = Standardised(rows.x) if network is None else network
    return torch.cat([space.embed(batch) for batch in rows.x.split(4096)])


def fit_answers(x: Tensor, y: Tensor, num_classes: int, blocks: Tensor | None) -> PrototypeNetwork:
    """Fit a network in closed form to labelled rows (n, dim) of two or more classes (n,)."""
    metadata = {"num_classes": num_classes}
    return solve_problem([(x, y)], None, metadata, TIME_LIMIT, "fast", blocks=blocks).network


def ask(session: Session, header: Sequence[str], ask_key: Callable[[str], str]) -> None:
    """Show rows and read labels until all rows are labelled or the user quits."""
    keys = dict(zip(KEYS, session.classes, strict=False))
    listed = [f"{key} {to_printable(name)}" for key, name in keys.items()]
    choices = "  ".join([*listed, f"{SKIP} skip", f"{UNDO} undo", f"{LEAVE} quit"])
    queue: list[Suggestion] = []
    while True:
        if not queue:
            session.learn(anew=True)
            queue = session.choose()
        if not queue:
            skipped = f"; {count(len(session.skipped), 'row')} skipped" if session.skipped else ""
            print(f"\nall rows are labelled{skipped}")
            return
        row, reason = queue[0]
        location = session.rows.table.position_format.format(session.rows.positions[row])
        lines = [f"\n{location} ({len(session.done)} labelled): {reason}"]
        for name, cell in zip(header, session.cells[row], strict=True):
            more = " ..." if len(cell) > MAX_CELL_LENGTH else ""
            lines.append(f"  {to_printable(name)} = {to_printable(cell[:MAX_CELL_LENGTH])}{more}")
        key = ask_key("\n".join([*lines, choices]))
        while key not in {*keys, SKIP, UNDO, LEAVE}:
            key = ask_key("")
        if key == LEAVE:
            return
        if key == UNDO:
            undone = session.undo()
            queue = queue if undone is None else [undone, *queue]
            continue
        queue = queue[1:]
        if key == SKIP:
            session.skip(row)
            continue
        session.answer(row, keys[key])
        print(f"{to_printable(keys[key])}. {session.summary()}")


@contextmanager
def open_keys() -> Iterator[Callable[[str], str]]:
    """Read single keys without Enter.

    Yields:
        A function that shows a text, waits for a key, and returns it; "" for other keys than letters and digits. Keys
        pressed before the text are discarded; the end of the input means to quit.
    """
    import termios  # noqa: PLC0415 - not on Windows
    import tty  # noqa: PLC0415

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def ask_key(text: str) -> str:
        if text:
            termios.tcflush(terminal, termios.TCIFLUSH)
            print(text, flush=True)
        pressed = os.read(terminal, 1)
        if pressed == b"\x1b":  # an escape sequence, such as an arrow
            while select.select([terminal], [], [], 0.05)[0] and os.read(terminal, 64):
                pass
        return pressed.decode("ascii", "replace") if pressed.isalnum() else "" if pressed else LEAVE

    try:
        tty.setcbreak(terminal)
        yield ask_key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
