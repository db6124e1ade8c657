"""``evaluate``: metrics equal those of scikit-learn, unknown classes are counted, misspelled classes are errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, classification_report, confusion_matrix, roc_auc_score
from torch import Tensor

from protonet import solve
from protonet.commands.rows import detect_respellings
from protonet.files import Model, load_model, save_model
from protonet.metrics import score_known_class
from protonet.tables import formats
from protonet.ui.text import MAX_LISTED_CLASSES
from tests.commands.cases import Run
from tests.strategies import blobs, write_columns

NAMES = ("ant", "bee, wild", "caf\N{LATIN SMALL LETTER E WITH ACUTE}")


def write_model(path: Path, classes: Sequence[str | int]) -> str:
    network = solve([blobs(0, classes=len(classes), rows=4, dim=3, noise=1.5)], effort="fast")
    names = tuple(classes)
    model = Model(network=network, classes=names, columns=("a", "b", "c"), metadata={"label": "kind"})  # type: ignore[arg-type]
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
    monkeypatch.setattr(formats, "CELLS_PER_CHUNK", cells)
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
    for table, path, message in (
        (
            spelled,
            output,
            "spell known classes as the model does; got 'ANT' for 'ant', 'bee, wild' for 'bee, wild' (spa",
        ),
        (
            unknown,
            output,
            "have a class that the model knows, such as ant; got only 'elk', 'A', 'B', 'C', 'D' and 2 more. ",
        ),
        (spelled, "t.txt", "end in .json; got t.txt. Rename it."),
    ):
        argument = "table" if path == output else "--json"
        error = run("evaluate", model, table, "--json", path, code=2)
        assert error.startswith(f"protonet evaluate: `{argument}` must {message}")
    assert not output.exists()
