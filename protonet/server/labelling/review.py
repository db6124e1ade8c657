"""The list of labels that users of the labelling page review."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protonet._io import JsonDict
from protonet.server.labelling.answers import compare_people
from protonet.server.labelling.queue import MAX_SELECTED_ROWS, LabelQueue


@dataclass(frozen=True)
class LabelFilter:
    """Selects labelled rows to list."""

    class_name: str | None  #: Only rows of this class; None for all classes.
    text: str  #: Only rows with a cell that contains this text, in upper or lower case.
    person: str | None  #: Only labels of this person; "" for labels without a person, None for all labels.
    disputed: bool  #: Only rows to which people gave different answers.

    def matches(self, cells: list[str], label: str, person: str, answers: Mapping[str, str]) -> bool:
        """Test whether to list a row with these cells, label, person who gave it, and answers by person."""
        return (
            self.class_name in (None, label)
            and self.person in (None, person)
            and (not self.disputed or len({*answers.values()}) > 1)
            and self.text.casefold() in "\n".join(cells).casefold()
        )


def list_labels(
    queue: LabelQueue, predictions: Mapping[int, tuple[str, float]], chosen: LabelFilter
) -> dict[str, object]:
    """List labelled rows: first rows that cross-validation predicts as another class, then the latest ones.

    Args:
        queue: The table and its labels.
        predictions: By row index, the class that cross-validation predicts and its probability.
        chosen: Selects the rows to list.

    Returns:
        ``rows``: for each listed row, the keys of `LabelQueue.row_to_dict`, its label as ``name``, its person as
            ``by``, the predicted class with its probability, and, if several people labelled it, their ``answers``;
            ``total``: number of rows that match; ``differing``: number of these rows that are predicted as another
            class; ``people``: names of all persons; ``agreement``: of each pair of people, by `compare_people`.
    """
    differing, others = list[JsonDict](), list[JsonDict]()
    for row, label in queue.session.labels.items():
        cells = queue.session.cells[row]
        by, answers = queue.people.get_person(cells), queue.people.answers.get(tuple(cells), {})
        if not chosen.matches(cells, label, by, answers):
            continue
        predicted, probability = predictions.get(row, (None, None))
        line = {"row": row, "name": label, "by": by, "predicted": predicted, "probability": probability}
        line["answers"] = [{"by": person, "name": answer} for person, answer in answers.items()]
        (others if predicted in (None, label) else differing).append(line)
    differing.sort(key=lambda line: -line["probability"])
    shown = [line | queue.row_to_dict(line["row"]) for line in (differing + others[::-1])[:MAX_SELECTED_ROWS]]
    result = {"rows": shown, "people": queue.people.names, "agreement": compare_people(queue.people.answers.values())}
    return result | {"total": len(differing) + len(others), "differing": len(differing)}
