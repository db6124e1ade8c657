"""``evaluate`` against scikit-learn, spellings of classes; ``info`` and ``--version``: the contents of a model file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, classification_report, confusion_matrix, roc_auc_score
from torch import Tensor

from protonet import PrototypeNetwork, solve
from protonet.files import Model, load_model, save_model
from protonet.files.archive import FORMAT_VERSION, check_entry_types, read_config
from protonet.files.metadata import ClassNameMetadata, TrainingMetadata
from protonet.metrics import score_known_class
from protonet.tables.formats import source as table_source
from protonet.tables.spellings import detect_respellings
from protonet.ui.text import MAX_LISTED_CLASSES
from tests.commands.cases import FAST, Run
from tests.strategies import blobs, join_archive, split_archive, write_columns

NAMES = ("ant", "bee, wild", "caf\N{LATIN SMALL LETTER E WITH ACUTE}")


def write_model(path: Path, classes: Sequence[str | int]) -> str:
    network = solve([blobs(0, classes=len(classes), rows=4, dim=3, noise=1.5)])
    facts = TrainingMetadata(label_column="kind")
    model = Model(network=network, classes=tuple(classes), columns=("a", "b", "c"), metadata=facts)  # type: ignore[arg-type]
    save_model(path, model)
    return str(path)


def write_table(path: Path, x: Tensor, labels: Sequence[object]) -> str:
    return write_columns(path, dict(zip("abc", x.T.tolist(), strict=True)) | {"kind": labels})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "m.safetensors", NAMES)


_NEAR, _KINDS = blobs(0, classes=3, rows=12, dim=3, noise=1.5)
_STRANGE = 4 * torch.randn(7, 3, generator=torch.Generator().manual_seed(2))
#: Rows of the known classes, with noise and without balance, and then some of strange ones.
X = torch.cat([_NEAR[:30] + 0.5 * torch.randn(30, 3, generator=torch.Generator().manual_seed(1)), _STRANGE])
LABELS = [NAMES[kind] for kind in _KINDS[:30].tolist()] + ["elk"] * 5 + ["fox"] * 2


@pytest.mark.parametrize(("cells", "known"), [(8, 37), (2**20, 30)])
def test_metrics_equal_those_of_scikit_learn(
    cells: int, known: int, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(table_source, "CELLS_PER_CHUNK", cells)
    results, output = run.read_json("evaluate", model, write_table(tmp_path / "t.csv", X[:known], LABELS[:known]))
    logits = load_model(model).network(X[:known])
    predicted, true = [NAMES[index] for index in logits[:30].argmax(dim=1).tolist()], LABELS[:30]
    theirs = classification_report(true, predicted, output_dict=True, zero_division=0)
    names = {"recall": "recall", "precision": "precision", "f1": "f1-score"}
    for row in results["classes"]:
        of_class = theirs[row["name"]]
        assert [row[name] for name in names] == pytest.approx([of_class[name] for name in names.values()])
        assert (row["rows"], row["predicted"]) == (of_class["support"], predicted.count(row["name"]))
        assert f"| {row['name']:<9} | {row['rows']:<4} | {100 * row['recall']:.2f} " in output
    means = [100 * theirs["macro avg"][name] for name in names.values()]
    assert f"| mean of 3 | 30   | {means[0]:<9.2f} | {means[1]:<12.2f} | {means[2]:.2f} |\n" in output
    assert list(results["mean"].values()) == pytest.approx([mean / 100 for mean in means])
    assert results["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(true, predicted))
    assert f"\nbalanced accuracy {100 * results['balanced_accuracy']:.2f} %; baseline, always " in output
    assert results["confusion"] == confusion_matrix(true, predicted, labels=NAMES).tolist()
    assert results["accuracy"] == pytest.approx(theirs["accuracy"])
    low, high = results["interval"]
    assert low < results["accuracy"] < high
    assert output.startswith(f"t.csv: accuracy {100 * results['accuracy']:.2f} % on 30 rows, 95 % interval [")
    assert f" [{100 * low:.2f}, {100 * high:.2f}]\n" in output
    assert (results["table"], results["rows"]) == ("t.csv", 30)
    if known == 30:
        assert results["unknown"] == {"rows": 0, "classes": {}, "auroc": None}
        assert "AUROC" not in output
        return
    auroc = roc_auc_score([True] * 30 + [False] * 7, score_known_class(logits).detach())
    assert results["unknown"] == {"rows": 7, "classes": {"elk": 5, "fox": 2}, "auroc": pytest.approx(auroc)}
    line = f"7 rows of 2 unknown classes (elk, fox): AUROC {100 * auroc:.1f} % of the rejection score"
    assert line in output.splitlines()


def test_many_classes_show_the_worst_first(tmp_path: Path, run: Run) -> None:
    model = write_model(tmp_path / "m.safetensors", range(22))
    x, y = blobs(0, classes=22, rows=6, dim=3, noise=1.5)
    results, output = run.read_json("evaluate", model, write_table(tmp_path / "t.csv", x, y.tolist()))
    shown = [line.split("|")[1:-1] for line in output.splitlines() if line.startswith("|")][2:]
    assert len(shown) == MAX_LISTED_CLASSES + 1
    scores = [float(row[-1]) for row in shown[:-1]]
    every = [100 * item["f1"] for item in results["classes"]]
    assert scores == pytest.approx(sorted(every)[:MAX_LISTED_CLASSES], abs=0.006)
    assert shown[-1][0].strip() == "mean of 22"
    assert "20 of 22 classes shown, the lowest F1 first; --json writes all\n" in output


def test_a_model_without_column_encoding_refuses_text(model: str, tmp_path: Path, run: Run) -> None:
    table = tmp_path / "text.csv"
    for cell in ("red", "1_000", "", "2020-01-02"):
        table.write_text(f"a,b,c\n1,2,3\n1,{cell},3\n")
        error = run("predict", model, table, code=2)
        assert f"`table` must have finite numbers; got {cell!r} in b, line 3." in error


def test_spellings() -> None:
    cases: list[tuple[list[str], list[Any], dict[str, str]]] = [
        (["0.0", "1", "2.50", "-0"], [0, 1, 2], {"0.0": "0", "-0": "0"}),
        (["CAT", " cat", "c at", "cat"], ["cat", "dog"], {"CAT": "cat", " cat": "cat"}),
        (["two  words", "two\u00a0words"], ["Two words"], dict.fromkeys(["two  words", "two\u00a0words"], "Two words")),
        (["cafe\u0301", "cafe"], ["caf\u00e9"], {"cafe\u0301": "caf\u00e9"}),
        (["STRASSE"], ["stra\u00dfe"], {"STRASSE": "stra\u00dfe"}),
        (["True", "1.0"], ["true", "1"], {"True": "true", "1.0": "1"}),
        (["cat", "CAT"], ["cat", "CAT"], {}),
        (["nan", "inf", "1e400", ""], ["1", "infinity"], {}),
        (["9007199254740993"], ["9007199254740992"], {}),
        (["1", "2.0"], ["1,0", "2,0"], {"1": "1,0", "2.0": "2,0"}),
        (["1e400"], ["1" + "0" * 400], {"1e400": "1" + "0" * 400}),
        (["1", "0", "No", "2"], ["True", "False"], {"1": "True", "0": "False", "No": "False"}),
        (["true", "no"], [0, 1], {"true": "1", "no": "0"}),
        (["1", "off"], ["yes", "no", "maybe"], {}),
        (["1"], ["yes", "on"], {}),
    ]
    for names, known, expected in cases:
        assert detect_respellings(names, known) == expected, names


def test_errors(tmp_path: Path, model: str, run: Run) -> None:
    spelled = write_table(tmp_path / "s.csv", X[:4], ["ant", "ANT", "bee,  wild", "\x1bant"])
    unknown = write_table(tmp_path / "u.csv", X[:7], ["elk", *"ABCDE", "\x1b[31m"])
    output = tmp_path / "t.json"
    known, unknown_classes = "spell known classes as the model does", "have a class that the model knows, such as ant"
    for table, path, message in (
        (spelled, output, f"`table` must {known}; got 'ANT' for 'ant', 'bee, wild' for 'bee, wild' (spa"),
        (unknown, output, f"`table` must {unknown_classes}; got only 'elk', 'A', 'B', 'C', 'D' and 2 more. "),
        (spelled, "t.txt", "`--json` must end in .json; got t.txt. Rename it."),
    ):
        error = run("evaluate", model, table, "--json", path, code=2)
        assert error.startswith(f"protonet evaluate: {message}")
    assert not output.exists()


ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = {"rows": 12, "accuracy": 0.75, "interval": [0.5, 0.875], "log_loss": 0.5, "calibration_error": 0.125}


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    return blobs(0, classes=3, rows=4, dim=3)


@pytest.fixture(scope="module")
def network(data: tuple[Tensor, Tensor]) -> PrototypeNetwork:
    return solve([data])


def write_model_of(path: Path, network: PrototypeNetwork, facts: TrainingMetadata, names: Any = ("a", "b", "c")) -> str:
    save_model(path, Model(network=network, classes=tuple(names), columns=("w", "x", "\x1b[31mz"), metadata=facts))
    return str(path)


def test_info_repeats_the_results_of_fit(tmp_path: Path, data: tuple[Tensor, Tensor], run: Run) -> None:
    x, y = data
    groups = [f"owner {row % 5}" for row in range(len(y))]
    rows = zip(x.tolist(), y.tolist(), groups, strict=True)
    lines = [f"{a},{b},{c},class {label},{group},r{index},0" for index, ((a, b, c), label, group) in enumerate(rows)]
    table, path = tmp_path / "t.csv", tmp_path / "m.safetensors"
    table.write_text("\n".join(["a,b,c,kind,owner,name,note", *lines]))
    options = ["--group", "owner", "--id", "name", "--drop", "note", "--seed", "7", "--time-limit", "900"]
    summary = run("fit", table, *FAST, *options, "--verbose", "-o", path)
    assert "time limit" not in summary
    model, facts = load_model(path), json.loads(run("info", path, "--json"))
    assert facts["classes"] == [{"name": f"class {index}", "samples": 4} for index in range(3)]
    assert (facts["samples"], facts["features"], facts["columns"]) == (12, 3, ["a", "b", "c"])
    assert facts["dropped"] == ["owner", "name", "note"]
    fitted = [facts[name] for name in ("label", "seed", "time_limit", "group", "groups", "id")]
    assert fitted == ["kind", 7, 900, "owner", len(set(groups)), "name"]
    assert facts["parameters"] == model.network.count_parameters()
    assert facts["buffer_elements"] == model.network.count_buffer_elements()
    assert (facts["bytes"], facts["version"]) == (path.stat().st_size, FORMAT_VERSION)
    assert facts["library"] == metadata.version("protonet-solver")
    assert sum(facts["views"].values()) == pytest.approx(1)
    assert facts["cross_validation"]["confusion"] == (model.metadata.cross_validation or {})["confusion"]
    output = run("info", path)
    assert output.startswith("m.safetensors: 3 classes, 12 samples, 3 features, 5 groups\n")
    for heading, value in (("label", "kind"), ("seed", "7"), ("groups by", "owner"), ("time limit, s", "900.0")):
        assert re.search(rf"^  {heading} +{value}$", output, re.MULTILINE)
    assert re.search(r"^  dropped +owner, name, note$", output, re.MULTILINE)
    assert "| class 0 | 4       |" in output
    for name, influence in facts["views"].items():
        row = rf"^\| {name} +\| {100 * influence:.1f} +\|"
        assert re.search(row, output, re.MULTILINE)
        assert re.search(row + r" \d\.\d{3} ", summary, re.MULTILINE)
    assert re.search(r"^\| standardised +\| none +\| \d\.\d{3} ", summary, re.MULTILINE)  # a candidate
    accuracy = 100 * facts["cross_validation"]["accuracy"]
    assert f"cross-validation on 12 rows: accuracy {accuracy:.2f} %, 95 % interval [" in output


def test_names_are_printed_without_control_characters(tmp_path: Path, network: PrototypeNetwork, run: Run) -> None:
    facts = TrainingMetadata(
        label_column="\x1b]0;x\x07",
        view_influences={"\x1b[1m": 1.0},
        dropped_columns=("\r",),
        id_column="\x08",
        cross_validation=HELD_OUT,
    )
    path = write_model_of(tmp_path / "m.safetensors", network, facts, ("a\x1b", "b\nc", "d"))
    output = run("info", path)
    assert all(item.isprintable() for item in output.replace("\n", ""))
    assert "| b\\nc " in output
    assert "accuracy 75.00 %, 95 % interval [50.00, 87.50], log-loss 0.500, calibration " in output
    assert [item["name"] for item in json.loads(run("info", path, "--json"))["classes"]] == ["a\x1b", "b\nc", "d"]


INVALID_METADATA: dict[str, object] = {
    "view_influences": {"a": "b"},
    "dropped_columns": "x",
    "group_indices": 1,
    "seed": [1],
    "time_limit": 10**400,
    "sample_counts": [-1],
    "uninformative_counts": [2**60],
    "class_names": {"classes": ["a"]},
    "cross_validation": {**HELD_OUT, "interval": [0.5]},
    "left_out": [],
}


@pytest.mark.parametrize("name", INVALID_METADATA)
def test_invalid_metadata_are_an_error(name: str, tmp_path: Path, network: PrototypeNetwork, run: Run) -> None:
    path = Path(write_model_of(tmp_path / "m.protonet", network, TrainingMetadata()))
    assert json.loads(run("info", path, "--json"))["cross_validation"] is None
    config, tensors = split_archive(path.read_bytes())
    path.write_bytes(join_archive(config | {"metadata": {name: INVALID_METADATA[name]}}, tensors))
    (tmp_path / "t.csv").write_text("w,x,z\n1,2,3\n")
    for arguments in (["info", path], ["predict", path, tmp_path / "t.csv"]):
        assert f"entry {name}" in run(*arguments, code=2)


def test_metadata_survive_json() -> None:
    names = ClassNameMetadata(classes=("a", 1), weight=2.5)
    stored = TrainingMetadata(
        seed=3, missing_texts=("", "?"), class_names=names, group_indices={"x": 1}, known_scores=(0.5,)
    )
    assert TrainingMetadata.from_json(json.loads(json.dumps(stored.to_json()))) == stored
    assert TrainingMetadata().to_json() == {}


def test_version_of_the_script_and_of_the_module() -> None:
    entry = re.search(r'^\[project\.scripts\]\nprotonet = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert entry is not None
    module, name = entry.groups()
    as_script = f"import sys, {module}; sys.argv[0] = 'protonet'; sys.exit({module}.{name}())"
    version = f"protonet {metadata.version('protonet-solver')}\n"
    for way in (["-m", "protonet"], ["-c", as_script]):
        words = [sys.executable, *way, "--version"]
        output = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (output.returncode, output.stdout, output.stderr) == (0, version, "")


def test_inconsistent_or_damaged_headers_are_refused(tmp_path: Path, network: PrototypeNetwork, run: Run) -> None:
    path = tmp_path / "m.protonet"
    write_model_of(path, network, TrainingMetadata())
    config, content = read_config(path), path.read_bytes()
    check_entry_types(config)
    changes: list[dict[str, Any]] = [
        *({"counts": value} for value in ([None, 1, 2], [7, 7])),
        *({"parameters": value} for value in (-5, "x")),
        *({"columns": value} for value in (True, [None])),
        *({name: None} for name in ("buffer_elements", "classes", "network")),
        *({"column_summaries": [[1]]}, {"library": 5}),
    ]
    for change in changes:
        for wrong in (config | change, {name: value for name, value in config.items() if name not in change}):
            with pytest.raises(ValueError, match="a config with entries of other types"):
                check_entry_types(wrong)
        path.write_bytes(join_archive(config | change, split_archive(content)[1]))
        assert "`model` must be a model file" in run("info", path, code=2)
    path.write_bytes(content[:99] + bytes([content[99] ^ 9]) + content[100:])
    assert "`model` must be a model file" in run("info", path, code=2)
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in run("info", tmp_path / "pipe", code=2)
