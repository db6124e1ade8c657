"""``protonet label``: a person's answers in the terminal, the most telling rows first."""

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
from protonet.commands.data import Unlabelled, read_cells, read_unlabelled
from protonet.commands.models import name_label, open_model, show_notes, suggest
from protonet.errors import raise_input_error
from protonet.files import Model
from protonet.fit.active import Standardised, Suggestion
from protonet.fit.solver import solve_problem
from protonet.network import PrototypeNetwork
from protonet.tables.delimited import MISSING_TEXTS
from protonet.ui.text import count

#: What is pressed for the classes, in their order, and what for something else.
KEYS = "123456789abcdefghijklmnoprtvwxyz"
SKIP, UNDO, LEAVE = "s", "u", "q"
#: Rows that are chosen at a time: what to ask is decided anew after so many answers.
BATCH = 5
#: Rows per class that are asked for, typical and spread, before there is anything to be in doubt with.
FIRST = 2
#: Rows without an answer that tell how sure it is, at the most; and answers that tell how often it was right.
SAMPLE, LATEST = 1024, 20
#: Most characters of a cell that are shown, and of the name of a class.
MOST_CELL, LONGEST = 300, 100
#: Seconds that learning from the answers may take.
TIME_LIMIT = 5.0


def run(options: argparse.Namespace) -> None:
    """Ask for the classes of rows until there is none left or the person leaves.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        KeyboardInterrupt: After Ctrl-C: every answer is kept.
        OSError: The answers cannot be written.
        InputError: Arguments, a model, a table or a file of answers that do not fit; no terminal.
    """
    output = options.outputs["output"]
    model = None if options.model is None else open_model(options, argument="--model")
    classes = parse_classes(options.classes, model)
    label = name_label(options.label, model)
    rows = read_unlabelled(options, model, label)
    header, cells = read_cells(options, model, label)
    show_notes(rows.table, quiet=options.quiet)
    with Answers(output, [*header, label], classes) as answers:
        session = Session(rows, cells, classes, model, answers)
        try:
            with open_keys() as ask_key:
                ask(session, header, ask_key)
        except KeyboardInterrupt:
            kept = f"stopped; {count(len(answers.rows), 'answer')} kept in {output}. The same command goes on."
            raise KeyboardInterrupt(kept) from None
    print(f"{count(len(answers.rows), 'answer')} in {output}: the same command goes on, and fit and update take them")


def parse_classes(text: str | None, model: Model | None) -> list[str]:
    """Return the names of the classes; by default, the model's.

    Raises:
        InputError: There are none, one alone without a model, too many, one twice, one that a table has for a gap, or
            one that the model does not know.
    """
    if text is None and model is None:
        raise_input_error(
            "--classes", "name the classes", "none", "Pass --classes cat,dog, or --model with a model's file."
        )
    known = [] if model is None else list(map(str, model.classes))
    names = known if text is None else [name.strip() for name in text.split(",")]
    least = 1 if known else 2
    if not least <= len(names) <= len(KEYS):
        raise_input_error(
            "--classes", f"be {least} to {len(KEYS)}, a key each", len(names), "Name others, with commas."
        )
    for name in names:
        if name.lower() in MISSING_TEXTS or names.count(name) > 1:
            must = "be different names, none of which means that there is no class"
            raise_input_error("--classes", must, repr(name), "Name others, with commas.")
        if known and name not in known:
            got = f"{name!r}, and it knows {', '.join(known[:10])}{' ...' if len(known) > 10 else ''}"
            remedy = "Name those, or leave out --model: protonet update adds classes to it afterwards."
            raise_input_error("--classes", "be classes that the model knows", got, remedy)
    return names


def check_class(name: object, known: Sequence[str]) -> str:
    """Return the name of a class, without spaces around it.

    Raises:
        InputError: It means that there is none, or cannot be shown.
    """
    text = name.strip() if isinstance(name, str) else ""
    if text in known:
        return text
    if text.lower() in MISSING_TEXTS or len(text) > LONGEST or not text.isprintable():
        raise_input_error(
            "name", f"be a name of up to {LONGEST} letters that means a class", repr(text[:40]), "Type another one."
        )
    return text


class Session:
    """What is asked, what was answered, and what is learned from it.

    Args:
        rows: The rows, as features.
        cells: Of each row, as the answers have them.
        classes: The names that there are keys for.
        model: What is known before; None for nothing.
        answers: Those so far. One to a row of these cells is an answer to it, of equal ones to the first, one
            without a class before those with one.

    Raises:
        InputError: An answer to a row that there is not.
    """

    def __init__(
        self, rows: Unlabelled, cells: Sequence[list[str]], classes: list[str], model: Model | None, answers: Answers
    ) -> None:
        self.rows, self.cells, self.classes, self.answers = rows, cells, classes, answers
        self.names = classes if model is None else list(map(str, model.classes))
        self.skipped: set[int] = set()
        self._fitted, self._learned = None if model is None else model.network, list[tuple[int, int]]()
        self._refits = model is None
        places: dict[tuple[str, ...], list[int]] = {}
        for row in sorted(range(len(cells)), key=lambda row: (bool(rows.known[row]), row), reverse=True):
            places.setdefault(tuple(cells[row]), []).append(row)
        self.done: list[int] = []  #: The row of each answer.
        for *own, name in answers.rows:
            if not places.get(tuple(own)):
                got = f"an answer {name!r} to a row that it has not"
                raise_input_error("table", "be the table that the answers are for", got, "Pass another --output.")
            self.done.append(places[tuple(own)].pop())
        self._steps = list(self.done)  # the rows that were answered or skipped, in the order of the keys
        self.right: list[bool | None] = [None] * len(self.done)
        """Of each answer, whether it was expected; None where nothing was learned yet, or it is an earlier start's."""
        self.network: PrototypeNetwork | None = None  #: What is learned so far, by `learn`.

    def learn(self, *, anew: bool = False) -> None:
        """Learn from the answers: a few more move the prototypes; without a model, all are fitted ``anew``."""
        self.network = self.make_network(self.list_answers(), anew=anew)

    def replace_rows(self, rows: Unlabelled) -> None:
        """Take other features of the same rows: all is to be learned anew."""
        self.rows, self.network, self._fitted, self._learned = rows, None, None, []

    def list_answers(self) -> list[tuple[int, int]]:
        """Return the row and the number of the class of each answer."""
        return [(row, self.names.index(told[-1])) for row, told in zip(self.done, self.answers.rows, strict=True)]

    def make_network(self, answers: list[tuple[int, int]], *, anew: bool) -> PrototypeNetwork | None:
        """Return what is learned from answers; None before two classes have some."""
        x = self.rows.x[[row for row, _ in answers]]
        y = torch.tensor([number for _, number in answers], dtype=torch.int64)
        if self._refits and (anew or self._fitted is None or self._learned != answers[: len(self._learned)]):
            self._fitted, self._learned = None, answers
            if len(y.unique()) > 1:
                self._fitted = fit_answers(x, y, len(self.names), self.rows.blocks)
        network, first = deepcopy(self._fitted), len(self._learned)
        if network is not None and len(y) > first:
            network.add_samples(x[first:], y[first:], num_classes=len(self.names))
        return network

    def list_left(self) -> Tensor:
        """Return the rows (n,) int64 without a class in the table that are neither answered nor skipped."""
        left = ~self.rows.known
        left[[*self.done, *self.skipped]] = False
        return left.nonzero().flatten()

    def choose(self, least: int = BATCH, left: Tensor | None = None) -> list[Suggestion]:
        """Return what to ask next, so many at least: the typical rows first, and then those that say most."""
        left, first = self.list_left() if left is None else left, FIRST * len(self.classes) - len(self.done)
        if not len(left):
            return []
        network = None if self._refits and first > 0 else self.network
        n = min(len(left), least if network is not None else max(least, first))
        return suggest(network, self.rows.x, n, list(map(to_printable, self.names)), rows=left)

    def answer(self, row: int, name: str) -> None:
        """Keep an answer, and learn from it."""
        self.keep(row, name)
        self.learn()

    @torch.no_grad()
    def keep(self, row: int, name: str) -> None:
        """Keep an answer."""
        self.answers.add(self.cells[row], name)
        guess = None if self.network is None else self.names[int(self.network(self.rows.x[[row]]).argmax())]
        self.right.append(None if guess is None else guess == name)
        self.done.append(row)
        self._steps.append(row)

    def change(self, row: int, name: str | None) -> None:
        """Give a row that was answered another class, or none."""
        at, rows = self.done.index(row), list(self.answers.rows)
        rows[at : at + 1] = [] if name is None else [[*self.cells[row], name]]
        self.answers.change(rows)
        if name is None:
            del self.done[at], self.right[at]
            self._steps.remove(row)

    def skip(self, row: int) -> None:
        """Leave a row out until the next start."""
        self.skipped.add(row)
        self._steps.append(row)

    def undo(self) -> Suggestion | None:
        """Take the last answer or skip back; return its row, and what it was, or None where there is none."""
        if not self._steps:
            return None
        row = self._steps.pop()
        if row in self.skipped:
            self.skipped.remove(row)
            return Suggestion(row, "taken back: it was skipped")
        *_, name = self.answers.undo()
        self.right.pop()
        self.done.pop()
        self.learn()
        return Suggestion(row, f"taken back: it was {to_printable(name)}")

    @torch.no_grad()
    def tell(self) -> str:
        """Say how sure it is by now of rows without an answer, and how often it was right."""
        left = self.list_left()
        if self.network is None:
            return "nothing is learned yet: two classes need an answer"
        if not len(left):
            return "no row is left"
        some = left[:: math.ceil(len(left) / SAMPLE)]
        sure = float(self.network(self.rows.x[some]).softmax(dim=1).amax(dim=1).mean())
        text = f"{100 * sure:.0f} % sure of {count(len(left), 'row')} left, on average and by its own account"
        latest = [right for right in self.right if right is not None][-LATEST:]
        if latest:
            text += f"; it would have said {sum(latest)} of your last {len(latest)}, which are among the hard ones"
        return text


@torch.no_grad()
def embed(rows: Unlabelled, network: PrototypeNetwork | None) -> Tensor:
    """Return the embedding (n, dim) of all rows; where nothing is learned, their standardised features."""
    space = Standardised(rows.x) if network is None else network
    return torch.cat([space.embed(part) for part in rows.x.split(4096)])


def fit_answers(x: Tensor, y: Tensor, num_classes: int, blocks: Tensor | None) -> PrototypeNetwork:
    """Fit a network, of closed forms alone, to answers: rows (n, dim) of classes (n,), of two at least."""
    metadata = {"num_classes": num_classes}
    return solve_problem([(x, y)], None, metadata, TIME_LIMIT, "fast", blocks=blocks).network


def ask(session: Session, header: Sequence[str], ask_key: Callable[[str], str]) -> None:
    """Show rows and take answers until there is no row left or the person leaves."""
    keys = dict(zip(KEYS, session.classes, strict=False))
    listed = [f"{key} {to_printable(name)}" for key, name in keys.items()]
    choices = "  ".join([*listed, f"{SKIP} skip", f"{UNDO} undo", f"{LEAVE} leave"])
    queue: list[Suggestion] = []
    while True:
        if not queue:
            session.learn(anew=True)
            queue = session.choose()
        if not queue:
            skipped = f"; {count(len(session.skipped), 'row')} skipped" if session.skipped else ""
            print(f"\nno row is left{skipped}")
            return
        row, reason = queue[0]
        lines = [f"\nrow {row} ({len(session.done)} answered): {reason}"]
        for name, cell in zip(header, session.cells[row], strict=True):
            lines.append(
                f"  {to_printable(name)} = {to_printable(cell[:MOST_CELL])}{' ...' if len(cell) > MOST_CELL else ''}"
            )
        key = ask_key("\n".join([*lines, choices]))
        while key not in {*keys, SKIP, UNDO, LEAVE}:
            key = ask_key("")
        if key == LEAVE:
            return
        if key == UNDO:
            back = session.undo()
            queue = queue if back is None else [back, *queue]
            continue
        queue = queue[1:]
        if key == SKIP:
            session.skip(row)
            continue
        session.answer(row, keys[key])
        print(f"{to_printable(keys[key])}. {session.tell()}")


@contextmanager
def open_keys() -> Iterator[Callable[[str], str]]:
    """Yield what shows a text, waits for a key without Enter, and returns it: "" for keys that are no letter or digit.

    What was pressed before the text was shown answers nothing. The end of the input is to leave.
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
        if pressed == b"\x1b":  # an arrow, say: the rest of it follows at once
            while select.select([terminal], [], [], 0.05)[0] and os.read(terminal, 64):
                pass
        return pressed.decode("ascii", "replace") if pressed.isalnum() else "" if pressed else LEAVE

    try:
        tty.setcbreak(terminal)
        yield ask_key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
