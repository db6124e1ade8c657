"""Run the code of a method's authors on episodes from a file, in a process of its own.

``python authors_worker.py FOLDER NAME EPISODES.npz OUT.npy ...``: all of these repositories call their
package ``src``, and so two cannot be imported together. Their code is read from the folder and stays there. What only
their training needs, and is not installed, is replaced by modules that do nothing; their GPU by this processor.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

#: Packages that these repositories import for training, plots and logs alone.
UNUSED = (
    *("configargparse", "cvxpy", "faiss", "matplotlib", "matplotlib.pyplot", "requests", "sacred", "seaborn"),
    *("torchvision", "torchvision.transforms", "visdom_logger"),
)
WAY = 5  #: Classes per episode: some of the code has it written into it.


class Case(NamedTuple):
    """Balanced episodes; support and queries come row by row, one of each class at a time."""

    support: Tensor  #: (episodes, shots * WAY, dim) float32.
    query: Tensor  #: (episodes, queries per class * WAY, dim) float32.
    mean: Tensor  #: (dim,) float32, of the base classes.
    base: Tensor  #: (rows, dim) float32, of some base classes; none where no method needs them.
    base_labels: Tensor  #: (rows,) int64.

    @property
    def shot(self) -> int:
        """Support rows per class."""
        return self.support.shape[1] // WAY

    def label(self, rows: Tensor) -> Tensor:
        """Return the labels (episodes, n) of rows (episodes, n, dim)."""
        return torch.arange(WAY).repeat(rows.shape[1] // WAY).expand(len(rows), -1).contiguous()


class Model(torch.nn.Module):
    """What stands for their backbone: features as they are."""

    def forward(self, rows: Tensor, feature: bool = True) -> tuple[Tensor, None]:
        """Return the rows, and no logits."""
        assert feature
        return rows, None


class Ingredient:
    """What TIM uses of sacred: functions take the arguments that they are not given from settings."""

    values: dict[str, Any] = {}  # noqa: RUF012 - one for all

    def __init__(self, name: str) -> None:
        del name

    def config(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the settings that are written there: ours are passed."""
        return function

    def capture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Fill in arguments by name."""
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def filled(*arguments: Any, **given: Any) -> Any:
            missing = [name for name in names[len(arguments) :] if name not in given and name in self.values]
            return function(*arguments, **given, **{name: self.values[name] for name in missing})

        return filled


class _Whatever(type):
    """The type of a class that has any attribute."""

    def __getattr__(cls, name: str) -> type[Nothing]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Nothing(metaclass=_Whatever):
    """What stands for anything in a package that is not there: a class, a function, a module."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        del arguments, given


def _find(name: str) -> type[Ingredient | Nothing]:
    """Return what stands for a name in a package that is not there."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Ingredient if name == "Ingredient" else Nothing


@contextmanager
def stand_in() -> Iterator[None]:
    """Replace the packages that are not there by modules that do nothing, and the GPU by the processor."""
    added, names, cuda = [], dict(vars(np)), torch.Tensor.cuda
    for name in UNUSED:
        if name not in sys.modules and ("." in name or importlib.util.find_spec(name) is None):
            module = sys.modules[name] = types.ModuleType(name)
            module.__getattr__ = _find  # type: ignore[method-assign]
            added.append(name)
    vars(np).update(float=float, in1d=np.isin)  # what NumPy called them then
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]
        for name in {"float", "in1d"} - names.keys():
            del vars(np)[name]
        torch.Tensor.cuda = cuda  # type: ignore[method-assign]


def run_tim(case: Case, name: str, **settings: Any) -> Any:
    """Run a class of TIM's own repository."""
    Ingredient.values.update(temp=15, loss_weights=[0.1, 1.0, 0.1], lr=1e-4, alpha=1.0, **settings)
    theirs = getattr(importlib.import_module("src.tim"), name)(model=Model())
    support, query = F.normalize(case.support, dim=2), F.normalize(case.query, dim=2)
    rows = {"support": support, "query": query, "y_s": case.label(support)}
    theirs.compute_lambda(**rows)
    theirs.init_weights(**rows, y_q=case.label(query))
    theirs.run_adaptation(**rows, y_q=case.label(query), callback=None)
    return theirs.get_logs()["acc"][:, -1]


def run_task(case: Case, name: str, module: str = "src.methods", **settings: Any) -> Any:
    """Run a class of the repositories that grew from TIM's: alpha-TIM's, PADDLE's and AM's."""
    args = Namespace(n_ways=WAY, batch_size=len(case.support), n_query=case.query.shape[1] // WAY, **settings)
    args.shots, args.balanced, args.dataset, args.arch = [case.shot], "balanced", "mini", "resnet18"
    theirs = getattr(importlib.import_module(module), name)
    task = {"x_s": case.support.clone(), "x_q": case.query.clone(), "train_mean": case.mean}
    task |= {"y_s": case.label(case.support)[..., None], "y_q": case.label(case.query)[..., None]}
    logs = theirs(model=Model(), device="cpu", log_file=os.devnull, args=args).run_task(task_dic=task, shot=case.shot)
    return logs["acc"][:, -1]


def run_laplacian_shot(case: Case) -> list[float]:
    """Run LaplacianShot's own repository, whose rows come class by class."""
    sys.path.insert(0, str(Path("src").resolve()))
    theirs = importlib.import_module("train_lshot")
    settings = {"proto_rect": True, "meta_val_way": WAY, "lshot": True, "lmd": 0.7, "knn": 3, "num_NN": 1}
    theirs.args = Namespace(**settings, plot_converge=False)  # type: ignore[attr-defined]  # a global there
    rows = case.support.unflatten(1, (case.shot, WAY)).transpose(1, 2).flatten(1, 2).numpy()
    labels = np.arange(WAY).repeat(case.shot)
    mean, of_query = case.mean.numpy(), case.label(case.query)[0].numpy()
    pairs = zip(rows, case.query.numpy(), strict=True)
    return [theirs.metric_class_type(*pair, labels, of_query, case.shot, train_mean=mean) for pair in pairs]


def run_script(case: Case, file: Path) -> tuple[dict[str, Any], Tensor]:
    """Run a script of PT-MAP's kind but for its main part; return its names, and the rows that it begins with.

    10,000 episodes and the GPU are written into some.
    """
    n, n_support, n_queries = len(case.support), case.support.shape[1], case.query.shape[1]
    text = file.read_text(encoding="utf-8").replace("repeat(10000", f"repeat({n}").replace("'cuda'", "'cpu'")
    labels = torch.cat([case.label(case.support), case.label(case.query)], dim=1)
    theirs: dict[str, Any] = {"__name__": "theirs", "labels": labels, "n_lsamples": n_support, "n_usamples": n_queries}
    theirs |= {"n_runs": n, "n_shot": case.shot, "n_ways": WAY, "n_queries": n_queries // WAY}
    exec(compile(text, str(file), "exec"), theirs)
    return theirs, torch.pow(torch.cat([case.support, case.query], dim=1) + 1e-6, 0.5)


def run_proto_lp(case: Case, file: Path) -> Any:
    """Run protoLP's script as its own main part does."""
    theirs, rows = run_script(case, file)
    n, n_support, n_queries = len(case.support), case.support.shape[1], case.query.shape[1]
    rows = theirs["scaleEachUnitaryDatas"](rows)
    rows = theirs["centerDatas"](theirs["SVDreduction"](rows, 40))
    model = theirs["GaussianModel"](WAY, 10)
    model.initFromLabelledDatas(rows, n, case.shot, n_queries // WAY, WAY, rows.shape[2])
    sizes = n, WAY, n_queries, n_support
    theirs["MAP"](0.2).loop(model, rows, *sizes, n_epochs=100)
    found = model.getProbas(rows, *sizes)[:, n_support:]
    found = found.where(found.isfinite(), torch.nan)
    right = (found.argmax(dim=2) == theirs["labels"][:, n_support:]).float().mean(dim=1)
    return right.where(found.isfinite().flatten(1).all(dim=1), torch.nan).numpy()


def run_pt_map(case: Case, file: Path) -> float:
    """Run PT-MAP's own script as its main part does, all episodes at once, and return the mean accuracy."""
    theirs, rows = run_script(case, file)
    rows = theirs["QRreduction"](rows)
    theirs["n_nfeat"] = rows.shape[2]
    theirs["ndatas"] = theirs["centerDatas"](theirs["scaleEachUnitaryDatas"](rows))
    model = theirs["GaussianModel"](WAY, 10)
    model.initFromLabelledDatas()
    return float(theirs["MAP"](0.2).loop(model, 20)[0])


class Index:
    """What iLPC uses of faiss: the nearest rows by inner product."""

    def __init__(self, *_: Any) -> None:
        self.rows = np.empty(0)

    @property
    def ntotal(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    def add(self, rows: Any) -> None:
        """Search these rows."""
        self.rows = rows

    def search(self, queries: Any, k: int) -> tuple[Any, Any]:
        """Return the ``k`` largest products of each query, and which rows they are with."""
        products = queries @ self.rows.T
        found = np.argsort(-products, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(products, found, axis=1), found


def scale_rows(rows: Any) -> None:
    """Scale rows to unit norm in place, as faiss does."""
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)


def run_ilpc(case: Case) -> list[float]:
    """Run iLPC as its transductive script does; a solver of SciPy has another name for its tolerance by now."""
    import scipy.sparse.linalg  # noqa: PLC0415 - few need it

    faiss: Any = importlib.import_module("faiss")
    faiss.GpuIndexFlatIP, faiss.normalize_L2 = Index, scale_rows
    theirs = importlib.import_module("iterative_graph_functions")
    solve = scipy.sparse.linalg.cg
    if "tol" not in inspect.signature(solve).parameters:
        scipy.sparse.linalg.cg = lambda *rest, tol, maxiter: solve(*rest, rtol=tol, maxiter=maxiter)
    rows = torch.cat([case.support, case.query], dim=1)
    rows = (rows.abs() + 1e-6).sqrt() * rows.sign().where(rows != 0, 1)
    rows = rows / rows.norm(dim=2, keepdim=True)
    rows = rows - rows.mean(dim=1, keepdim=True)
    rows = rows / rows.norm(dim=2, keepdim=True)
    n_support, n_queries = case.support.shape[1], case.query.shape[1]
    settings = {"K": 15, "alpha": 0.8, "T": 3, "sinkhorn_iter": 1, "denoising_iterations": 1000, "best_samples": 3}
    found = []
    for own in rows:
        torch.manual_seed(0)
        opt = Namespace(**settings, unbalanced=False, no_samples=np.repeat(n_queries / WAY, WAY))
        labels = case.label(case.support)[0], case.label(case.query)[0]
        pairs = own[:n_support], labels[0], own[n_support:], labels[1]
        of_query, guess = theirs.iter_balanced_trans(opt, *pairs, n_support)
        found.append(float(np.mean(np.asarray(of_query) == np.asarray(guess))))
    return found


def run_calibration(case: Case) -> list[float]:
    """Run the function of distribution calibration as its script does; what it samples is random."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - few need it

    theirs = importlib.import_module("evaluate_DC")
    classes = [case.base[case.base_labels == each].numpy() for each in case.base_labels.unique()]
    means, covariances = [each.mean(axis=0) for each in classes], [np.cov(each.T) for each in classes]
    generator, found = np.random.RandomState(0), []
    labels = case.label(case.support)[0].numpy()
    for support, query in zip(case.support.sqrt().numpy(), case.query.sqrt().numpy(), strict=True):
        count = 750 // case.shot
        rows = [support]
        for row in support:
            mean, covariance = theirs.distribution_calibration(row, means, covariances, k=2)
            rows.append(generator.multivariate_normal(mean=mean, cov=covariance, size=count))
        fitted = LogisticRegression(max_iter=1000).fit(np.concatenate(rows), [*labels, *labels.repeat(count)])
        found.append(float(np.mean(fitted.predict(query) == case.label(case.query)[0].numpy())))
    return found


def run_metaopt(case: Case) -> Any:
    """Run MetaOptNet's head, with the solver that it imports from a folder beside it."""
    sys.path.insert(1, str(Path("../qpth").resolve()))
    theirs = importlib.import_module("models.classification_heads")
    labels = case.label(case.support)
    logits = theirs.MetaOptNetHead_SVM_CS(case.query, case.support, labels, WAY, case.shot)
    return (logits.argmax(dim=2) == case.label(case.query)).float().mean(dim=1).numpy()


ENTROPIES: dict[str, Any] = {"entropies": ["Shannon", "Alpha", "Alpha"], "alpha_values": [5.0, 5.0, 5.0]}
COMMON: dict[str, Any] = {"temp": 15, "loss_weights": [1.0, 1.0, 1.0], "iter": 1000, "use_tuned_alpha_values": True}
MANIFOLD: dict[str, Any] = {"phi": "mus+G+Wb", "K": 20, "alpha": 0.8, "lr_lp": 1e-4, "PLC": False}
#: What each name runs, with the settings of the repository's own configuration.
RUNS: dict[str, Callable[[Case], Any]] = {
    "TIM-GD": lambda case: run_tim(case, "TIM_GD", iter=1000),
    "TIM-ADM": lambda case: run_tim(case, "TIM_ADM", iter=150),
    "alpha-TIM": lambda case: run_task(case, "ALPHA_TIM", lr_alpha_tim=1e-4, **COMMON, **ENTROPIES),
    "BD-CSPN": lambda case: run_task(case, "BDCSPN", num_NN=1, norm_type="CL2N"),
    "LaplacianShot": run_laplacian_shot,
    "PT-MAP": lambda case: run_task(case, "PT_MAP", beta=0.5, lam=10, alpha=0.2, n_epochs=20),
    "PADDLE": lambda case: run_task(case, "PADDLE", iter=100, alpha=case.query.shape[1]),
    "protoLP": lambda case: run_proto_lp(case, Path("test_standard_GSSL_lapshot.py")),
    "iLPC": run_ilpc,
    "distribution calibration": run_calibration,
    "MetaOptNet": run_metaopt,
    "alpha-AM": lambda case: run_task(case, "ALPHA_AM", "src.methods.AM", **MANIFOLD, **COMMON, **ENTROPIES),
}


#: Those that take powers of features; of negative ones these are no numbers, which would count as the first class.
POWERS = {"PT-MAP", "protoLP", "distribution calibration"}


def main(folder: str, *jobs: str) -> None:
    """Write the accuracy of each episode, for each name, file of episodes and file to write."""
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.path[0] = str(Path.cwd())
    with stand_in():
        for name, episodes, out in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
            with np.load(episodes) as arrays:
                case = Case(*(torch.from_numpy(arrays[each]) for each in Case._fields))
            negative = bool((case.support < 0).any() | (case.query < 0).any())
            found = np.nan if negative and name in POWERS else RUNS[name](case)
            np.save(out, np.broadcast_to(np.asarray(found, dtype=np.float64), len(case.support)))


if __name__ == "__main__":
    main(*sys.argv[1:])
