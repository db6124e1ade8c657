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
    return {f"x{index}": column.tolist() for index, column in enumerate(x.T)} | {"kind": [f"k{k}" for k in y]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit_model(write_columns(tmp_path_factory.mktemp("told") / "t.csv", make(0)))


def test_update_warns_about_repeated_rows(model: Path, tmp_path: Path, run: Run) -> None:
    first, more = write_columns(tmp_path / "t.csv", make(0)), write_columns(tmp_path / "u.csv", make(1))
    twice = {name: cells + cells[:1] for name, cells in make(2).items()}
    again, new, old = write_columns(tmp_path / "v.csv", twice), tmp_path / "new.safetensors", tmp_path / "old"

    def check(source: Path, table: str, repeated: str) -> None:
        output = run("update", source, table, *(["--in-place"] if source == new else ["-o", new]))
        line = " equal to earlier or other new ones: they count"
        assert (f"\n{repeated}{line}" in output) == (line in output) == bool(repeated)

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
def test_equal_rows_are_detected_again(dtype: torch.dtype, origin: float) -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=dtype) + origin
    problem, _ = prepare_training_set(x, torch.arange(40) % 2, 2)
    known = problem.original_features(torch.arange(30))
    came = torch.tensor([int(index) in range(30) for index in problem.indices])
    assert torch.equal(match_rows(x, known, problem.origin), came)
    assert not match_rows(x * (1 + 1e-4 / (1 + origin)), known, problem.origin).any()
    assert not match_rows(x, known[:0], problem.origin).any()


def test_rows_differ_by_any_bit() -> None:
    x = torch.randint(0, 4, (20000, 12), generator=torch.Generator().manual_seed(0)).float()
    assert len(hash_rows(x).unique()) == len(x.unique(dim=0))
    assert torch.equal(hash_rows(x), hash_rows(x.double()))
    assert torch.equal(hash_rows(-0.0 * x), hash_rows(0.0 * x))
    assert hash_rows(x[:1]) != hash_rows(x[:1].flip(1) + 1)


def test_invalid_models_give_errors_of_the_command(model: Path, tmp_path: Path, run: Run) -> None:
    table, other = write_columns(tmp_path / "t.csv", make(0)), tmp_path / "other"
    other.write_text("no model")
    remaining: dict[str, list[object]] = {"explain": [], "info": [], "export": ["--onnx", tmp_path / "m.onnx"]}
    remaining |= {"predict": [table], "evaluate": [table], "suggest": [table], "update": [table, "--in-place"]}
    for command, more in remaining.items():
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


def test_errors_of_useless_tables_suggest_no_option(tmp_path: Path, run: Run) -> None:
    for cells, keeps in (["x"] * 18, 0), (list(range(18)), 1):
        columns = {"a": cells, "kind": make(0)["kind"]}
        fitting = run("fit", write_columns(tmp_path / "t.csv", columns), *FAST, code=2)
        suggesting = run("suggest", write_columns(tmp_path / "u.csv", {"a": cells}), code=2)
        assert (fitting.count("--columns"), suggesting.count("--columns")) == (keeps, 0)
        assert fitting.endswith(" Add features.\n")
        assert suggesting.endswith(" Add features.\n")
