"""Training tables: a file and a data frame give the same features; unlabelled rows; warnings and errors are data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from protonet.errors import InputError
from protonet.estimator.frames import encode_frame, read_frame
from protonet.tables.table import ReadSpec
from protonet.tables.training import TrainingTable

RNG = np.random.default_rng(0)
N = 24
FRAME = pd.DataFrame(
    {
        "size": RNG.normal(size=N).round(3),
        "sort": np.where(np.arange(N) % 2, "red", "blue"),
        "gaps": np.where(np.arange(N) % 5, RNG.normal(size=N).round(3), np.nan),
        "one": "same",
    }
)
LABELS = np.array(["ant", "bee", "cow"])[np.arange(N) % 3]
SPEC = ReadSpec(label_column="kind")


def write(path: Path, labels: np.ndarray = LABELS, frame: pd.DataFrame = FRAME) -> Path:
    frame.assign(kind=labels).to_csv(path, index=False)
    return path


def test_a_file_and_a_frame_give_the_same_features(tmp_path: Path) -> None:
    of_file = TrainingTable.from_file(write(tmp_path / "t.csv"), SPEC)
    rows = read_frame(FRAME)
    assert rows is not None
    of_frame = TrainingTable.from_frame(rows, of_file.y.numpy(), ("ant", "bee", "cow"), {})
    assert of_file.columns == of_frame.columns == ("size", "sort", "gaps")
    assert of_file.column_descriptions == of_frame.column_descriptions
    assert of_file.dropped_columns == ("one",)
    torch.testing.assert_close(of_file.x.double(), of_frame.x)
    assert [of_file.classes[label] for label in of_file.y.tolist()] == LABELS.tolist()
    assert of_file.notes == ["dropped: one: constant"]
    assert of_file.missing_counts == [0, 0, int(FRAME["gaps"].isna().sum())]
    assert of_frame.encoding is not None
    x, mask = encode_frame(rows, of_frame.encoding, of_frame.columns, list(of_frame.column_descriptions))
    assert np.array_equal(x.astype(np.float64), of_frame.x.numpy())
    assert not mask.any()


def test_unlabelled_rows_are_encoded_as_labelled_ones(tmp_path: Path) -> None:
    """Those of the file come first; rows without a known cell are left out, with a note."""
    labels, frame = LABELS.copy(), FRAME.copy()
    labels[:4] = ""
    frame.loc[2] = [np.nan, "grey", np.nan, "same"]  # whose category no labelled row has
    other = write(tmp_path / "more.csv", labels[:3], frame.iloc[:3])
    table = TrainingTable.from_file(write(tmp_path / "t.csv", labels, frame), SPEC, unlabelled=other)
    assert table.unlabelled is not None
    assert len(table.x) == N - 4
    n_notes = len(table.notes)
    x = torch.cat(list(table.unlabelled))
    assert table.unlabelled_locations == ["line 2", "line 3", "line 5", "line 2 of more.csv", "line 3 of more.csv"]
    assert torch.equal(x[:2], x[3:])
    text = "1 unlabelled row without a readable cell left out, first line 4"
    assert table.notes[n_notes:] == [text, f"{text} of more.csv"]
    assert table.encoding is not None
    rows = read_frame(frame.iloc[[0, 1, 3]][["size", "sort", "gaps"]])
    assert rows is not None
    assert np.array_equal(x[:3].numpy(), table.encoding.encode(rows.columns))


def test_groups_and_identifiers_may_be_one_column(tmp_path: Path) -> None:
    frame = FRAME.assign(owner=[f"o{row // 2}" for row in range(N)])
    labels = np.repeat(["ant", "bee"], N // 2)
    spec = ReadSpec(label_column="kind", extra_columns={"owner": "id"}, has_groups=True, has_ids=True)
    table = TrainingTable.from_file(write(tmp_path / "t.csv", labels, frame), spec)
    assert table.groups is not None
    assert [table.group_names[group] for group in table.groups.tolist()] == table.ids == frame["owner"].tolist()


def test_selected_rows_keep_their_origins(tmp_path: Path) -> None:
    table = TrainingTable.from_file(write(tmp_path / "t.csv"), SPEC)
    some = table.select_rows(np.array([5, 2]))
    assert [some.rows.format_location(row) for row in range(2)] == ["line 7", "line 4"]
    assert torch.equal(some.x, table.x[[5, 2]])
    assert some.class_counts == [0, 0, 2]
    assert table.has_label.all()


def test_contradicting_labels_are_warnings(tmp_path: Path) -> None:
    frame = FRAME.copy()
    frame.loc[1] = frame.loc[0]
    table = TrainingTable.from_file(write(tmp_path / "t.csv", frame=frame), SPEC)
    expected = "warning: contradicting labels: 2 rows equal rows of another class: line 2 (ant), line 3 (bee)"
    assert table.notes[-1] == expected


def test_errors_name_the_argument(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv")
    cases: list[tuple[ReadSpec, dict[str, str], str]] = [
        (ReadSpec(label_column="kinds"), {}, r"^`label` must name a column of the table; got kinds"),
        (ReadSpec(label_column="one"), {}, r"^`table` must have at least 2 classes; got same alone in one"),
        (ReadSpec(label_column="size"), {}, r"^`label` must name a column of classes; got 24 classes in size"),
        (
            ReadSpec(label_column="none", require_labels=False),
            {"ant": "", "bee": "", "cow": ""},
            r"^`label` must name the column of the labels; got kind, whose cells are classes",
        ),
        (ReadSpec(label_column="kind", column_types={"sizes": "text"}), {}, r"^`column_type` must name a feature"),
    ]
    for spec, descriptions, message in cases:
        with pytest.raises(InputError, match=message):
            TrainingTable.from_file(path, spec, descriptions=descriptions)
    rows = read_frame(FRAME[["one"]])
    assert rows is not None
    with pytest.raises(InputError, match=r"^`X` must have a column of use"):
        TrainingTable.from_frame(rows, np.arange(N) % 2, ("a", "b"), {})
