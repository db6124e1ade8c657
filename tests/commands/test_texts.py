"""Commands and the estimator on embedded texts, and on classes with informative names."""

from __future__ import annotations

import copy
import csv
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet.errors import InputError
from protonet.estimator import ProtoNetClassifier
from protonet.files import load_model, save_model
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.text import EmbeddedText
from tests.commands.cases import Run, do, read_table
from tests.embeddings.cases import write_vectors

pytest.importorskip("wordllama", reason="it brings vectors of words")
pytest.importorskip("tokenizers", reason="it turns texts into tokens")
pytestmark = pytest.mark.usefixtures("embedding_cache")
#: Four training texts and two test texts of each class.
TEXTS_OF_CLASS = {
    "card_arrival": "when will my new card arrive; my card has not arrived yet; how long does the card delivery take; "
    "track the delivery of my card; the post did not bring my card; card still not here after two weeks",
    "close_account": "close my account; delete the account please; how can I terminate my account; I want to leave the "
    "bank and close everything; cancel my account today; remove my account and data",
    "exchange_rate": "what is the exchange rate for euros; the currency conversion rate was wrong; which rate do "
    "you use for dollars; exchange rate of pounds today; foreign currency rates are bad; rate applied to yen is odd",
    "lost_phone": "I lost my phone; my phone was stolen on the train; somebody took my mobile phone; phone missing "
    "since yesterday; left my mobile in a taxi; I cannot find my phone anywhere",
    "refund_request": "I want a refund; please refund the payment to me; give my money back; reimburse the purchase; "
    "the shop owes me a refund; how do I request money back",
}
TEXTS = {name: texts.split("; ") for name, texts in TEXTS_OF_CLASS.items()}
NAMES = list(TEXTS)
FAST = ("--representation", "words")


def write_table(
    path: Path, rows: slice, names: Mapping[str, str] | None = None, classes: Sequence[str] = NAMES
) -> Path:
    """Write a table of some texts of each class; ``names`` maps the classes to other names."""
    names = dict(zip(NAMES, NAMES, strict=True)) if names is None else names
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "intent"])
        writer.writerows([text, names[name]] for name in classes for text in TEXTS[name][rows])
    return path


def count_right(predicted: str, rows: int) -> int:
    result = [row["class"] for row in read_table(predicted)]
    assert len(result) == rows * len(NAMES)
    return sum(name == NAMES[index // rows] for index, name in enumerate(result))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tables, a table of classes, and a model."""
    root = tmp_path_factory.mktemp("meaning")
    write_table(root / "train.csv", slice(0, 4))
    write_table(root / "test.csv", slice(4, 6))
    (root / "classes.csv").write_text("\n".join(["class", *NAMES]) + "\n", encoding="utf-8")
    bare = ["text", *(text for texts in TEXTS.values() for text in texts)]
    (root / "bare.csv").write_text("\n".join(bare) + "\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTONET_CACHE", str(root / "cache"))
        do("fit", root / "train.csv", "--label", "intent", *FAST, "-o", root / "m.protonet")
    return root


def test_texts_are_classified_by_their_embeddings(fitted: Path, tmp_path: Path, run: Run) -> None:
    model, test = fitted / "m.protonet", fitted / "test.csv"
    predicted = run("predict", model, test)
    right = count_right(predicted, 2)
    assert right >= 9
    metrics = tmp_path / "figures.json"
    run("evaluate", model, test, "--json", metrics)
    assert json.loads(metrics.read_text(encoding="utf-8"))["accuracy"] == pytest.approx(right / 10)
    assert run("predict", model, test, "--representation", "words") == predicted
    result = run("info", model)
    assert "text: text by words (24143450), 256 numbers, and " in result
    assert "| text   | +" in run("explain", model, test)
    suggested = tmp_path / "ask.csv"
    run("suggest", model, fitted / "bare.csv", "-n", 3, "-o", suggested)
    texts = [row["text"] for row in read_table(suggested.read_text(encoding="utf-8"))]
    assert len(set(texts)) == 3
    assert run("suggest", fitted / "bare.csv", "--representation", "words", "-n", 3).count("\n") == 5
    new = tmp_path / "new.protonet"
    assert "10 samples added, 0 new class" in run("update", model, test, "-o", new)
    assert run.count_samples(model) == [4] * 5
    assert run.count_samples(new) == [6] * 5
    assert count_right(run("predict", new, test), 2) >= right


def spoil(model: Path, path: Path, **changes: Any) -> Path:
    """Save a copy of a model with changes in the record of its text encoder."""
    loaded = load_model(model, for_update=True)
    assert loaded.encoding is not None
    (column,) = loaded.encoding.columns
    assert isinstance(column, EmbeddedText)
    embedded = replace(column.embedding, record=replace(column.embedding.record, **changes))
    save_model(path, replace(loaded, encoding=Encoding((replace(column, embedding=embedded),))))
    return path


def test_another_encoder_than_that_of_fit_is_refused(fitted: Path, tmp_path: Path, run: Run) -> None:
    model, test, output = fitted / "m.protonet", fitted / "test.csv", tmp_path / "out.csv"
    other = spoil(model, tmp_path / "other.protonet", digest="f" * 64)
    unknown = spoil(model, tmp_path / "unknown.protonet", name="../../etc")
    pictures = spoil(model, tmp_path / "named.protonet", name="a.onnx")
    for name in ("a.onnx\x1b[31m", "a" * 5000):
        with pytest.raises(InputError, match="an encoder without a usable name"):
            spoil(model, tmp_path / "hostile.protonet", name=name)
    vectors = write_vectors(tmp_path / "vectors")
    cases: dict[tuple[object, ...], str] = {
        (other, test): "words (ffffffff), 256 numbers; got words (24143450). Install the version of fit",
        (unknown, test): "be that of fit, ../../etc (24143450), 256 numbers; got none. Pass --representation FOLDER",
        (pictures, test): "be that of fit, a.onnx (24143450), 256 numbers; got none",
        (model, test, "--representation", vectors): "be that of fit, words (24143450), 256 numbers; got",
        (model, test, "--representation", "wordz"): "must be auto, none, or one of sentences",
        (model, test, "--representation", "x.onnx"): "a model whose pictures a pretrained encoder read in fit",
    }
    for arguments, message in cases.items():
        for more in (["predict", *arguments, "-o", output], ["evaluate", *arguments], ["explain", *arguments]):
            error = run(*more, code=2)
            assert message in error, more
            assert error.startswith(f"protonet {more[0]}: `--representation` must ")
    assert not output.exists()


def test_an_encoder_folder_is_an_option_of_each_command(fitted: Path, tmp_path: Path, run: Run) -> None:
    vectors, model, test = write_vectors(tmp_path / "vectors"), tmp_path / "m.protonet", fitted / "test.csv"
    run("fit", fitted / "train.csv", "--label", "intent", "--representation", vectors, *FAST[2:], "-o", model)
    predicted = run("predict", model, test, "--representation", vectors)
    assert "Pass --representation FOLDER, where it is now" in run("predict", model, test, code=2)
    moved = vectors.rename(tmp_path / "elsewhere")
    assert run("predict", model, test, "--representation", moved) == predicted
    changed = write_vectors(tmp_path / "vectors", table=np.eye(9, 5, dtype=np.float32))
    assert "be that of fit, vectors (" in run("predict", model, test, "--representation", changed, code=2)
    estimator = ProtoNetClassifier.load(model)
    with pytest.raises(ValueError, match=r"^`representation` must be that of fit, vectors"):
        estimator.predict(make_frame(test)[0])


def test_names_alone_classify_the_majority_of_texts(fitted: Path, tmp_path: Path, run: Run) -> None:
    model, new = tmp_path / "m.protonet", tmp_path / "new.protonet"
    more = ["--balanced", "--report", tmp_path / "r.html", "--json", tmp_path / "r.json"]
    result = run("fit", fitted / "bare.csv", "--classes", fitted / "classes.csv", *FAST, *more, "-o", model)
    assert "bare.csv: 5 classes, 0 samples, 256 features" in result
    assert "the names of 5 classes are training samples, each as 4 samples" in result
    assert "no cross-validation" in result
    assert count_right(run("predict", model, fitted / "bare.csv"), 6) >= 27
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert report["data"]["rows"] == 0
    result = run("suggest", model, fitted / "bare.csv", "-n", 2)
    assert result.count("\n") == 4
    assert run.count_samples(model) == [0] * 5
    run("update", model, fitted / "test.csv", "--label", "intent", "-o", new)
    assert run.count_samples(new) == [2] * 5
    assert count_right(run("predict", new, fitted / "test.csv"), 2) == 10


def test_a_class_without_rows_is_predicted_by_its_name(fitted: Path, tmp_path: Path, run: Run) -> None:
    table, model = write_table(tmp_path / "some.csv", slice(0, 4), classes=NAMES[:3]), tmp_path / "m.protonet"
    fit = ["fit", table, "--label", "intent", *FAST[2:], "-o", model, "--classes", fitted / "classes.csv"]
    result = run(*fit, *FAST[:2], "--balanced")
    assert "the names of 5 classes are training samples" in result
    assert "never predicted" not in result
    assert run.count_samples(model) == [4, 4, 4, 0, 0]
    assert count_right(run("predict", model, fitted / "test.csv"), 2) >= 8
    result = run(*fit, "--representation", "none")
    assert "never predicted, without rows or informative names: lost_phone, refund_request" in result
    assert run.count_samples(model) == [4, 4, 4, 0, 0]


def test_uninformative_names_have_no_effect(fitted: Path, tmp_path: Path, run: Run) -> None:
    actual = []
    for letter in ("c", "class "):
        names = {name: f"{letter}{index}" for index, name in enumerate(NAMES)}
        table, model = write_table(tmp_path / "t.csv", slice(0, 4), names), tmp_path / "m.protonet"
        result = run("fit", table, "--label", "intent", *FAST, "-o", model)
        assert "are training samples" not in result
        predicted = run("predict", model, fitted / "test.csv", "--proba")
        actual.append(re.sub(rf"\b{letter}(\d)\b", r"\1", predicted))
        assert run.count_samples(model) == [4] * 5
    assert actual[0] == actual[1]
    assert actual[0].count("\n") == 11


def test_invalid_class_files_are_errors(fitted: Path, tmp_path: Path, run: Run) -> None:
    fit = ["fit", fitted / "bare.csv", *FAST]
    contents = {
        "name\na\n": "must have a column class; got",
        "class\na\nb\na\n": "must name each class once; got 'a' repeatedly",
        "class,description\na,x\n,y\n": "must name a class in each row",
        "class\n": "`--classes` must name classes; got",
        "class\none\n": "`--classes` must have at least 2 classes; got one",
        "class\nc1\nc2\n": "`--classes` must name or describe classes in words",
        "class\nKlasse 0\nKlasse 1\nKlasse 2\nKlasse 3\n": "`--classes` must name or describe classes in words",
    }
    for content, message in contents.items():
        classes = tmp_path / "c.csv"
        classes.write_text(content, encoding="utf-8")
        assert message in run(*fit, "--classes", classes, code=2), content
    good = fitted / "classes.csv"
    assert "no such file" in run(*fit, "--classes", tmp_path / "nowhere.csv", code=2)
    none = run("fit", fitted / "bare.csv", "--representation", "none", "--classes", good, code=2)
    assert 'Run pip install -e ".[text]", pass `--representation`, or label some rows' in none
    for label, message in (
        ([], "`--label` must name the column of the labels; got intent, whose cells are classes"),
        ([], "Pass `--label` intent"),
        (["--label", "nope"], "`--label` must name a column of the table; got nope"),
    ):
        assert message in run("fit", fitted / "train.csv", "--classes", good, *label, *FAST, code=2)
    indices = tmp_path / "n.csv"
    indices.write_text("a,intent\n" + "".join(f"{n},{n % 2}\n" for n in range(12)), encoding="utf-8")
    error = run("fit", indices, "--label", "intent", *FAST, code=2)
    assert "`--representation` must come with a column of texts; got words, and none. Leave it out" in error


def make_frame(path: Path) -> tuple[Any, list[str]]:
    """Read a table of texts as a pandas frame and a list of classes."""
    pandas = pytest.importorskip("pandas", reason="it makes frames")
    frame = pandas.read_csv(path)
    return frame[["text"]], frame["intent"].tolist()


def test_an_estimator_reads_frames_of_texts(fitted: Path, tmp_path: Path, run: Run) -> None:
    (x, y), (test, expected) = make_frame(fitted / "train.csv"), make_frame(fitted / "test.csv")
    estimator = ProtoNetClassifier(representation="words").fit(x, y)
    probabilities = estimator.predict_proba(test)
    assert (estimator.predict(test) == expected).mean() >= 0.9
    assert estimator.columns_["text"].startswith("text by words (24143450)")
    for copied in (pickle.loads(pickle.dumps(estimator)), copy.deepcopy(estimator)):
        np.testing.assert_array_equal(copied.predict_proba(test), probabilities)
    path = tmp_path / "m.protonet"
    estimator.save(path)
    loaded = ProtoNetClassifier.load(path)
    np.testing.assert_allclose(loaded.predict_proba(test), probabilities, rtol=1e-4, atol=1e-6)
    predicted = read_table(run("predict", path, fitted / "test.csv"))
    assert [row["class"] for row in predicted] == estimator.predict(test).tolist()
    assert run.count_samples(path) == [4] * 5
    few = ProtoNetClassifier(representation="words")
    few.fit(*make_frame(write_table(tmp_path / "1.csv", slice(0, 1)))).save(path)
    assert few.network_.counts.tolist() == [5] * 5
    assert run.count_samples(path) == [1] * 5
    few.partial_fit(x[:1], ["another"]).save(path)  # before the others in the alphabet
    ProtoNetClassifier.load(path).save(path)
    assert run.count_samples(path) == [1] * 6
    with pytest.raises(ValueError, match=r"^`representation` must be auto, none, or one of"):
        ProtoNetClassifier(representation="wordz").fit(x, y)


def test_an_unreadable_text_gets_the_class_frequencies(fitted: Path, tmp_path: Path, run: Run) -> None:
    texts = ["", "😀😀😀", "我想开一个储蓄账户", "مرحبا بك في البنك", "I lost my phone"]
    with (tmp_path / "new.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    predicted = read_table(run("predict", fitted / "m.protonet", tmp_path / "new.csv", quiet=False))
    assert "4 rows have no information" in run.notes
    fractions = [float(row["probability"]) for row in predicted]
    assert fractions[:4] == pytest.approx([1 / len(NAMES)] * 4, abs=1e-5)
    assert fractions[4] > 2 / len(NAMES)
    frame = pytest.importorskip("pandas", reason="it makes frames").DataFrame({"text": texts})
    with pytest.warns(UserWarning, match="4 rows have no information"):
        result = ProtoNetClassifier.load(fitted / "m.protonet").predict_proba(frame)
    np.testing.assert_allclose(result[:4], 1 / len(NAMES), atol=0.02)
