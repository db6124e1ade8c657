from __future__ import annotations

from pathlib import Path

import pytest

from analysis.commands.folders import Timed, same_files, tabulate, write_folder


def test_paces_are_of_a_process_and_of_the_cpu() -> None:
    first, second = tabulate([Timed("one", 1, 100, 10.0, 5.0, 1.0), Timed("two", 2, 400, 16.0, 25.0, 1.0)])
    assert (first["pace"], first["thrift"], first["share"]) == (10.0, 20.0, 100.0)
    assert (second["pace"], second["thrift"], second["share"]) == (12.5, 16.0, 80.0)


def test_the_first_files_are_linked_and_no_two_are_equal(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    size = write_folder(tmp_path, 3, 2, 5, 4)
    paths = sorted((tmp_path / "all").iterdir())
    assert size == sum(path.stat().st_size for path in paths)
    assert [path.name for path in sorted((tmp_path / "few").iterdir())] == [path.name for path in paths[:2]]
    tables = [parquet.read_table(path).to_pydict() for path in paths]
    assert len(tables[0]["x0"]) == 5
    assert tables[0] != tables[1]
    assert "label" in parquet.read_schema(tmp_path / "train.parquet").names


def test_a_file_that_differs_ends_the_study(tmp_path: Path) -> None:
    for name, text in (("a", "1"), ("b", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.csv").write_text(text, encoding="utf-8")
    same_files(tmp_path / "a", tmp_path / "a")
    with pytest.raises(AssertionError, match=r"x\.csv differs"):
        same_files(tmp_path / "a", tmp_path / "b")
