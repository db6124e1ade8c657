"""Answers that several people gave for the same rows, and the agreement between these people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

from starlette.exceptions import HTTPException

from protonet.server.labelling.label_file import LabelFile


class People:
    """The people who label, by the names that they enter: who gave each label, and the answers of others.

    A second answer is one that a person gives to a row without knowing the label of another person. Rows are identified
    by their cells, so that rows with equal cells share their people.

    Args:
        label_file: The person, the cells and the label of rows; the last line of a row names who gave its label.
        answer_file: The person, the cells and the answer of rows with a second answer, a line for each person. Answers
            remain when the label is changed in a review, which knows them.
    """

    def __init__(self, label_file: LabelFile, answer_file: LabelFile) -> None:
        self._label_file, self._answer_file = label_file, answer_file
        self._persons = {tuple(cells): person for person, *cells, _ in label_file.rows}
        self._skipped: set[tuple[str, ...]] = set()  # person and cells
        # Each renaming since the start: old and new name, and the lines (person, *cells) that had the old one.
        self._renames: list[tuple[str, str, set[tuple[str, ...]]]] = []
        self.answers: dict[tuple[str, ...], dict[str, str]] = {}  #: By the cells of a row, the answer of each person.
        self._index_answers()

    def _index_answers(self) -> None:
        """Set `answers` to those in the file."""
        self.answers = {}
        for person, *cells, name in self._answer_file.rows:
            self.answers.setdefault(tuple(cells), {})[person] = name

    @property
    def names(self) -> list[str]:
        """The names of all people who gave labels or answers, sorted."""
        return sorted({*self._persons.values(), *(line[0] for line in self._answer_file.rows)} - {""})

    def get_person(self, cells: Sequence[str]) -> str:
        """Return the person who gave a row its label; "" if unknown."""
        return self._persons.get(tuple(cells), "")

    def has_other(self, cells: Sequence[str], person: str) -> bool:
        """Test whether both this person and the one who gave a row its label are known, and differ."""
        return person != "" and self.get_person(cells) not in {"", person}

    def awaits_answer(self, cells: Sequence[str], person: str) -> bool:
        """Test whether a person has not given or skipped the second answer to a row of another person."""
        given = person in self.answers.get(tuple(cells), {}) or (person, *cells) in self._skipped
        return self.has_other(cells, person) and not given

    def change_label(self, cells: Sequence[str], person: str, name: str) -> None:
        """Save the person who gave a row its label ``name``."""
        if person != self.get_person(cells):
            self._label_file.add([person, *cells], name)
            self._persons[tuple(cells)] = person

    def record_label(self, cells: Sequence[str], person: str, name: str) -> None:
        """Save the person who labelled a row that had no label."""
        self.change_label(cells, person, name)
        if person and tuple(cells) in self.answers:  # the first answer was undone, a second one was not
            self._add_answer(cells, person, name)

    def add_second_answer(self, cells: Sequence[str], person: str, name: str, label: str) -> None:
        """Save a person's answer to a row that another person has labelled as ``label``.

        Raises an HTTPException if the person has given another answer.
        """
        answers = self.answers.get(tuple(cells), {})
        if answers.get(person, name) != name:
            raise HTTPException(409, "`row` must be without your answer; got one that you have answered.")
        for other, answer in ((self.get_person(cells), label), (person, name)):
            if other not in answers:
                self._add_answer(cells, other, answer)

    def _add_answer(self, cells: Sequence[str], person: str, name: str) -> None:
        """Save an answer; it replaces an earlier one of the person."""
        self._answer_file.add([person, *cells], name)
        self.answers.setdefault(tuple(cells), {})[person] = name

    def skip(self, cells: Sequence[str], person: str) -> None:
        """Do not ask a person for a second answer to a row until the next start."""
        self._skipped.add((person, *cells))

    def remove_answer(self, cells: Sequence[str], person: str) -> None:
        """Remove the answer of a person to a row, or the mark that it was skipped; the answers of others remain."""
        self._skipped.discard((person, *cells))
        self._replace_answers([line for line in self._answer_file.rows if line[:-1] != [person, *cells]])

    def rename_class(self, old: str, new: str) -> None:
        """Rename a class in all answers."""
        renamed = {tuple(line[:-1]) for line in self._answer_file.rows if line[-1] == old}
        self._renames.append((old, new, renamed))
        self._set_names(renamed, new)

    def undo_rename(self, old: str, new: str) -> None:
        """Undo the last renaming of class ``old`` to ``new``, if there was one."""
        index = next((at for at, entry in reversed([*enumerate(self._renames)]) if entry[:2] == (old, new)), None)
        if index is not None:
            self._set_names(self._renames.pop(index)[2], old)

    def _set_names(self, keys: set[tuple[str, ...]], name: str) -> None:
        """Replace the answers of the given persons and rows."""
        self._replace_answers(
            [[*line[:-1], name if tuple(line[:-1]) in keys else line[-1]] for line in self._answer_file.rows]
        )

    def _replace_answers(self, lines: list[list[str]]) -> None:
        """Replace all lines, if they have changed; a file that does not exist yet is not created."""
        if lines != self._answer_file.rows:
            self._answer_file.replace_rows(lines)
            self._index_answers()


def compute_cohen_kappa(pairs: Iterable[tuple[str, str]]) -> tuple[int, float, float | None]:
    """Compute the agreement of two people, who answered the same rows.

    Args:
        pairs: The answer of the first and of the second person for each row; at least one row.

    Returns:
        The number of rows, the fraction of rows with equal answers, and Cohen's kappa: the agreement beyond that of
        independent answers with the same class frequencies, divided by its maximum. Kappa is None if it is not defined,
        because both people gave the same class to all rows.

    Source:
        Cohen (1960), A coefficient of agreement for nominal scales, https://doi.org/10.1177/001316446002000104.
    """
    counts = Counter(pairs)
    n, agreeing = counts.total(), sum(count for (first, second), count in counts.items() if first == second)
    totals = [Counter[str](), Counter[str]()]
    for names, count in counts.items():
        for total, name in zip(totals, names, strict=True):
            total[name] += count
    expected = sum(totals[0][name] * totals[1][name] for name in totals[0])  # in units of 1 / n²
    kappa = None if expected == n * n else (agreeing * n - expected) / (n * n - expected)
    return n, agreeing / n, kappa


def compare_people(rows: Iterable[dict[str, str]]) -> list[dict[str, object]]:
    """Compute the agreement of each pair of people from the answers by person of each row.

    Returns:
        For each pair, in alphabetical order: ``people``, two names; ``rows``, the number of rows that both answered;
        ``agreement`` and ``kappa``, computed by `compute_cohen_kappa`.
    """
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for answers in rows:
        for first, second in combinations(sorted(answers), 2):
            pairs.setdefault((first, second), []).append((answers[first], answers[second]))
    result: list[dict[str, object]] = []
    for people, both in sorted(pairs.items()):
        n, agreement, kappa = compute_cohen_kappa(both)
        result.append({"people": people, "rows": n, "agreement": agreement, "kappa": kappa})
    return result
