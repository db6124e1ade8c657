"""What commands say of what was typed: rows that come twice, -q everywhere, arguments by the names that people know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protonet.__main__ import COMMANDS, main
from protonet._checks import InputError, as_typed, fail
from protonet.files import load_model, save_model
from protonet.fit.copies import find_equal, hash_rows
from protonet.fit.problem import pose_problem
from tests.strategies import blobs, write_columns

FAST = ("--label", "kind", "--effort", "fast", "-q")


def make(seed: int) -> dict[str, list[object]]:
    x, y = blobs(seed, classes=3, rows=6, dim=3)
    return {f"x{number}": column.tolist() for number, column in enumerate(x.T)} | {"kind": [f"k{k}" for k in y]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("told")
    path = str(folder / "m.safetensors")
    assert main(["fit", write_columns(folder / "t.csv", make(0)), *FAST, "-o", path]) == 0
    return path


def test_update_notices_rows_that_it_was_given(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, more = write_columns(tmp_path / "t.csv", make(0)), write_columns(tmp_path / "u.csv", make(1))
    new, line = (
        str(tmp_path / "new.safetensors"),
        " equal to others that the model was given, before or now: they count",
    )
    for number, (source, table, repeated) in enumerate(
        ((model, first, "18 samples"), (model, more, ""), (new, more, "18 samples"), (new, first, "18 samples"))
    ):
        assert main(["update", source, table, *(["--in-place"] if source == new else ["-o", new])]) == 0, number
        said = capsys.readouterr().out
        assert ("18 samples" + line in said) == bool(repeated)
        assert (line in said) == bool(repeated)
    twice = {name: cells + cells[:1] for name, cells in make(2).items()}
    assert main(["update", new, write_columns(tmp_path / "v.csv", twice), "--in-place"]) == 0
    assert "\n1 sample" + line in capsys.readouterr().out
    old = load_model(new, held=True)
    del old.held["given"]
    save_model(new, old)  # as files were that do not say: of these, the rows that fit held out are known
    for table, repeated in ((first, "18 samples"), (str(tmp_path / "v.csv"), "1 sample"), (more, "")):
        assert main(["update", new, table, "-o", str(tmp_path / "w.safetensors")]) == 0
        said = capsys.readouterr().out
        assert (f"\n{repeated}{line}" in said) == (line in said) == bool(repeated)


@pytest.mark.parametrize(("dtype", "origin"), [(torch.float32, 0.0), (torch.float64, 1e6)])
def test_equal_rows_are_found_in_a_problem_again(dtype: torch.dtype, origin: float) -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=dtype) + origin
    problem, _ = pose_problem(x, torch.arange(40) % 2, 2)
    known = problem.features_as_they_came(torch.arange(30))
    came = torch.tensor([int(place) in range(30) for place in problem.places])
    assert torch.equal(find_equal(x, known, problem.origin), came)
    assert not find_equal(x * (1 + 1e-4 / (1 + origin)), known, problem.origin).any()
    assert not find_equal(x, known[:0], problem.origin).any()


def test_rows_are_told_apart_by_every_bit() -> None:
    x = torch.randint(0, 4, (20000, 12), generator=torch.Generator().manual_seed(0)).float()
    assert len(hash_rows(x).unique()) == len(x.unique(dim=0))
    assert torch.equal(hash_rows(x), hash_rows(x.double()))
    assert torch.equal(hash_rows(-0.0 * x), hash_rows(0.0 * x))
    assert hash_rows(x[:1]) != hash_rows(x[:1].flip(1) + 1)


def test_quiet_is_known_to_every_command(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", model, "-q"]) == 0
    assert capsys.readouterr().out.startswith("m.safetensors: 3 classes")
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert "-q, --quiet" in capsys.readouterr().out


def test_messages_name_what_was_typed(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_columns(tmp_path / "t.csv", make(0))
    none, text = str(tmp_path / "none.csv"), write_columns(tmp_path / "x.csv", {"a": ["b"], "kind": ["c"]})
    bare = write_columns(tmp_path / "u.csv", {name: cells for name, cells in make(0).items() if name != "kind"})
    for arguments, argument in (
        (["fit", none], "table"),
        (["fit", table, "--label", "kind", "--unlabelled", none], "--unlabelled"),
        (["fit", table, "--label", "kind", "--unlabelled", text], "--unlabelled"),
        (["fit", text, "--label", "kind"], "table"),
        (["predict", none, table], "model"),
        (["predict", text, table], "model"),
        (["predict", model, none], "table"),
        (["predict", model, text], "table"),
        (["predict", model, table, "--unknown", "2"], "--unknown"),
        (["evaluate", model, text], "table"),
        (["update", none, table, "-o", str(tmp_path / "m.safetensors")], "model"),
        (["suggest", none, table], "model"),
        (["suggest", model, bare, "-n", "999"], "-n"),
        (["suggest", none], "table"),
        (["explain", none], "model"),
        (["info", none], "model"),
        (["export", none, "--onnx", str(tmp_path / "m.onnx")], "model"),
    ):
        assert main(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert said.startswith(f"protonet {arguments[0]}: `{argument}` must "), said
        assert len(said.splitlines()) == 1


def test_what_is_no_model_is_told_in_the_words_of_the_command(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_columns(tmp_path / "t.csv", make(0))
    none, other = str(tmp_path / "none"), str(tmp_path / "other")
    Path(other).write_text("no model")
    more = {"export": ["--onnx", str(tmp_path / "m.onnx")], "update": [table, "--in-place"], "predict": [table]}
    more |= {"evaluate": [table], "suggest": [table], "explain": [], "info": []}
    for command, rest in more.items():
        for path, told in (
            (none, f"must be a file that exists; got {none}. There is no such file; pass one that fit wrote."),
            (other, "Pass a file that fit wrote."),
            (table, f"must be a model, which comes before a table; got the table {table}. Pass a file that fit wrote."),
        ):
            assert (
                main(
                    [
                        command,
                        path,
                        *(
                            each if each != table or path != table or command in {"update", "suggest"} else model
                            for each in rest
                        ),
                    ]
                )
                == 2
            )
            said = capsys.readouterr().err
            assert said.startswith(f"protonet {command}: `model` must be a "), said
            assert said.endswith(f"{told}\n"), said
    assert not Path(none).exists()
    with pytest.raises(InputError, match=r"^load_model: .* Pass a file that save_model wrote\.$"):
        load_model(other)
    assert main(["suggest", table, model]) == 2
    assert capsys.readouterr().err == (
        f"protonet suggest: `arguments` must end in a table; got the model {model}. Name the table there.\n"
    )


def test_a_table_of_no_use_asks_for_no_option_that_does_not_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for cells, keeps in (["x"] * 18, 0), (list(range(18)), 1):
        columns = {"a": cells, "kind": make(0)["kind"]}
        assert main(["fit", write_columns(tmp_path / "t.csv", columns), "--label", "kind"]) == 2
        assert main(["suggest", write_columns(tmp_path / "u.csv", {"a": cells})]) == 2
        fitting, suggesting = capsys.readouterr().err.splitlines()
        assert (fitting.count("--columns"), suggesting.count("--columns")) == (keeps, 0)
        assert fitting.endswith(" Add features.")
        assert suggesting.endswith(" Add features.")


def test_a_fault_is_told_by_another_name_and_stays_what_it_is() -> None:
    with (
        pytest.raises(InputError, match=r"^command: `FILE` must be good; got 3\. Mend it\.$"),
        as_typed("command", a="FILE"),
    ):
        fail("function", "a", "be good", 3, "Mend it.")
    with pytest.raises(InputError, match=r"^command: `b` must be good"), as_typed("command", a="FILE"):
        fail("function", "b", "be good", 3, "Mend it.")
    with pytest.raises(InputError, match=r"^other$"), as_typed("command", a="FILE"):
        raise InputError("other")
