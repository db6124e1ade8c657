"""Files of embeddings: their content, and that an interruption changes none of their bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet.episodes.features.extract import Job, write_embeddings

ROWS = np.random.default_rng(0).standard_normal((11, 3)).astype(np.float32)
LABELS = list("aabbccddeef")
SIDES = ["base"] * 6 + ["novel"] * 5


def make_job(stop: int | None = None, rows: np.ndarray = ROWS, **changed: Any) -> Job:
    def embed(first: int) -> Iterator[np.ndarray]:
        assert first % 4 == 0
        for start in range(first, len(rows), 4):
            if stop is not None and start >= stop:
                raise KeyboardInterrupt
            yield rows[start : start + 4]

    files = [f"{label}.png" for label in LABELS]
    job = Job(labels=LABELS, sides=SIDES, files=files, embed=embed, step=4, made={"backbone": "net"}, state="state")
    return replace(job, **changed)


@pytest.mark.parametrize("stop", [0, 8])
def test_a_resumed_run_has_the_same_bytes(tmp_path: Path, stop: int) -> None:
    full, path = tmp_path / "whole.npz", tmp_path / "a.npz"
    write_embeddings(full, make_job(), resume=False)
    with pytest.raises(KeyboardInterrupt, match=rf"stopped after {stop} of 11 rows; run again with --resume"):
        write_embeddings(path, make_job(stop), resume=False)
    assert not path.exists()
    expected_message = r"^`output` must be a new file; got .*a\.npz\.part, which exists\. Go on"
    with pytest.raises(ValueError, match=expected_message):
        write_embeddings(path, make_job(), resume=False)
    write_embeddings(path, make_job(), resume=True)
    with np.load(path) as result, np.load(full) as expected:
        assert all(result[name].tobytes() == expected[name].tobytes() for name in expected.files)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.npz", "whole.npz"]


def test_incomplete_runs_are_repeated(tmp_path: Path) -> None:
    for cut in (1, 11, 30, 1000):
        path, part = tmp_path / f"{cut}.npz", tmp_path / f"{cut}.npz.part"
        with pytest.raises(KeyboardInterrupt):
            write_embeddings(path, make_job(8), resume=False)
        part.write_bytes(part.read_bytes()[: -min(cut, part.stat().st_size)])
        write_embeddings(path, make_job(), resume=True)
        with np.load(path) as result:
            assert np.array_equal(result["x"], ROWS)


@pytest.mark.parametrize("changed", [{"state": "other"}, {"sides": None}])
def test_a_file_of_something_else_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "a.npz"
    message = r"^`resume` must continue a run of the same arguments; got .*a\.npz"
    with pytest.raises(KeyboardInterrupt):
        write_embeddings(path, make_job(8), resume=False)
    with pytest.raises(ValueError, match=rf"{message}\.part, of other data"):
        write_embeddings(path, make_job(**changed), resume=True)
    write_embeddings(path, make_job(), resume=True)
    with pytest.raises(ValueError, match=rf"{message}, of other data"):
        write_embeddings(path, make_job(**changed), resume=True)
    np.savez(path, x=ROWS)
    with pytest.raises(ValueError, match=rf"{message}, of other data"):
        write_embeddings(path, make_job(), resume=True)


def test_embeddings_that_are_not_finite_are_one_line(tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[6, 1] = np.inf
    expected_message = r"^`backbone` must give finite numbers; got others for row 6\. Pass"
    with pytest.raises(ValueError, match=expected_message):
        write_embeddings(tmp_path / "a.npz", make_job(rows=rows), resume=False)
    assert not (tmp_path / "a.npz").exists()
