"""What commands say of what was typed: rows that come twice, and arguments by the names that people know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protonet.errors import InputError
from protonet.files import load_model, save_model
from protonet.fit.duplicates import hash_rows, match_rows
from protonet.fit.training_set import prepare_training_set
from tests.commands.cases import FAST, Run, fit_model
from tests.strategies import blobs, write_columns


def make(seed: int) -> dict[str, list[object]]:
    x, y = blobs(seed, classes=3, rows=6, dim=3)
    return {f"x{number}": column.tolist() for number, column in enumerate(x.T)} | {"kind": [f"k{k}" for k in y]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit_model(write_columns(tmp_path_factory.mktemp("told") / "t.csv", make(0)))


def test_update_notices_rows_that_it_was_given(model: Path, tmp_path: Path, run: Run) -> None:
    first, more = write_columns(tmp_path / "t.csv", make(0)), write_columns(tmp_path / "u.csv", make(1))
    twice = {name: cells + cells[:1] for name, cells in make(2).items()}
    again, new, old = write_columns(tmp_path / "v.csv", twice), tmp_path / "new.safetensors", tmp_path / "old"

    def check(source: Path, table: str, repeated: str) -> None:
        said = run("update", source, table, *(["--in-place"] if source == new else ["-o", new]))
        line = " equal to earlier or other new ones: they count"
        assert (f"\n{repeated}{line}" in said) == (line in said) == bool(repeated)

    check(model, first, "18 samples")
    check(model, more, "")
    check(new, more, "18 samples")
    check(new, first, "18 samples")
    check(new, again, "1 sample")
    before = load_model(new, for_update=True)
    del before.update_state["given"]
    save_model(old, before)  # as files were that do not say: of these, the rows that fit held out are known
    check(old, first, "18 samples")
    check(old, again, "1 sample")
    check(old, more, "")


@pytest.mark.parametrize(("dtype", "origin"), [(torch.float32, 0.0), (torch.float64, 1e6)])
def test_equal_rows_are_found_in_a_problem_again(dtype: torch.dtype, origin: float) -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=dtype) + origin
    problem, _ = prepare_training_set(x, torch.arange(40) % 2, 2)
    known = problem.original_features(torch.arange(30))
    came = torch.tensor([int(place) in range(30) for place in problem.indices])
    assert torch.equal(match_rows(x, known, problem.origin), came)
    assert not match_rows(x * (1 + 1e-4 / (1 + origin)), known, problem.origin).any()
    assert not match_rows(x, known[:0], problem.origin).any()


def test_rows_are_told_apart_by_every_bit() -> None:
    x = torch.randint(0, 4, (20000, 12), generator=torch.Generator().manual_seed(0)).float()
    assert len(hash_rows(x).unique()) == len(x.unique(dim=0))
    assert torch.equal(hash_rows(x), hash_rows(x.double()))
    assert torch.equal(hash_rows(-0.0 * x), hash_rows(0.0 * x))
    assert hash_rows(x[:1]) != hash_rows(x[:1].flip(1) + 1)


def test_what_is_no_model_is_told_in_the_words_of_the_command(model: Path, tmp_path: Path, run: Run) -> None:
    table, other = write_columns(tmp_path / "t.csv", make(0)), tmp_path / "other"
    other.write_text("no model")
    rest: dict[str, list[object]] = {"explain": [], "info": [], "export": ["--onnx", tmp_path / "m.onnx"]}
    rest |= {"predict": [table], "evaluate": [table], "suggest": [table], "update": [table, "--in-place"]}
    for command, more in rest.items():
        error = run(command, other, *more, code=2)
        assert error.startswith(f"protonet {command}: `model` must be a ")
        assert error.endswith("Pass a file that fit wrote.\n")
        error = run(command, table, *([model] if command in {"predict", "evaluate"} else more), code=2)
        must = f"be a model file, which comes before the table; got the table {table}. Pass a file that fit wrote."
        assert error == f"protonet {command}: `model` must {must}\n"
    with pytest.raises(InputError, match=r"^.* Pass a file that save_model wrote\.$"):
        load_model(other)
    error = run("suggest", table, model, code=2)
    assert error.startswith(f"protonet suggest: `arguments` must end with a table; got the model {model}. ")


def test_a_table_of_no_use_asks_for_no_option_that_does_not_help(tmp_path: Path, run: Run) -> None:
    for cells, keeps in (["x"] * 18, 0), (list(range(18)), 1):
        columns = {"a": cells, "kind": make(0)["kind"]}
        fitting = run("fit", write_columns(tmp_path / "t.csv", columns), *FAST, code=2)
        suggesting = run("suggest", write_columns(tmp_path / "u.csv", {"a": cells}), code=2)
        assert (fitting.count("--columns"), suggesting.count("--columns")) == (keeps, 0)
        assert fitting.endswith(" Add features.\n")
        assert suggesting.endswith(" Add features.\n")
