"""Run the code of a method's authors on episodes from a file, in a process of its own, and keep what it predicts.

``python -m analysis.episodes.authors_worker FOLDER NAME EPISODES.npz OUT.npy EPISODES.npz OUT.npy ...``: many of these
repositories call their package ``src``, and so two cannot be imported together. Their code is read from the folder and
stays there.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import types
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.episodes.authors_stand_ins import Array, Graph, Index, Ingredient, Labels, Model, scale_rows, stand_in

WAY = 5  #: Classes per episode: some of the code has it written into it.
NOTHING = -1  #: The prediction of a query that has none.
FEW = 10  #: Episodes that are run again where that takes long.


class Case(NamedTuple):
    """Balanced episodes; support and queries come row by row, one of each class at a time."""

    support: Tensor  #: (episodes, shots * WAY, dim) float32.
    query: Tensor  #: (episodes, queries per class * WAY, dim) float32.
    mean: Tensor  #: (dim,) float32, of the base classes.
    base: Tensor  #: (rows, dim) float32, of some base classes; none where no method needs them.
    base_labels: Tensor  #: (rows,) int64.
    unlabelled: Tensor = torch.empty(0)  #: (episodes, n, dim) float32, further rows; none where no method needs them.
    shape: Tensor = torch.zeros(
        3, dtype=torch.int64
    )  #: (3,), channels, height and width of rows that are maps, else zeros.

    @property
    def shot(self) -> int:
        """Support rows per class."""
        return self.support.shape[1] // WAY

    def label(self, rows: Tensor) -> Tensor:
        """Return the labels (episodes, n) of rows (episodes, n, dim)."""
        return torch.arange(WAY).repeat(rows.shape[1] // WAY).expand(len(rows), -1).contiguous()

    def pair_maps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield support and query of each episode as maps (rows, channels, height, width)."""
        for pair in zip(self.support, self.query, strict=True):
            support, query = (rows.unflatten(1, self.shape.tolist()) for rows in pair)
            yield support, query


def run_tim(case: Case, name: str, **settings: Any) -> Any:
    """Run a class of TIM's own repository."""
    Ingredient.values.update(temp=15, loss_weights=[0.1, 1.0, 0.1], lr=1e-4, alpha=1.0, **settings)
    theirs = getattr(importlib.import_module("src.tim"), name)(model=Model())
    support, query = F.normalize(case.support, dim=2), F.normalize(case.query, dim=2)
    rows = {"support": support, "query": query, "y_s": case.label(support)}
    theirs.compute_lambda(**rows)
    asked = case.label(query).as_subclass(Labels)
    theirs.init_weights(**rows, y_q=asked)
    theirs.run_adaptation(**rows, y_q=asked, callback=None)
    return Labels.take_last(len(query))


def run_task(case: Case, name: str, module: str = "src.methods", **settings: Any) -> Any:
    """Run a class of the repositories that grew from TIM's: alpha-TIM's, PADDLE's and AM's."""
    args = Namespace(n_ways=WAY, batch_size=len(case.support), n_query=case.query.shape[1] // WAY, **settings)
    args.shots, args.balanced, args.dataset, args.arch = [case.shot], "balanced", "mini", "resnet18"
    theirs = getattr(importlib.import_module(module), name)
    task = {"x_s": case.support.clone(), "x_q": case.query.clone(), "train_mean": case.mean}
    asked = case.label(case.query).as_subclass(Labels)
    task |= {"y_s": case.label(case.support)[..., None], "y_q": asked[..., None]}
    theirs(model=Model(), device="cpu", log_file=os.devnull, args=args).run_task(task_dic=task, shot=case.shot)
    return Labels.take_last(len(case.query))


def run_laplacian_shot(case: Case) -> Any:
    """Run LaplacianShot's own repository, whose rows come class by class."""
    sys.path.insert(0, str(Path("src").resolve()))
    theirs = importlib.import_module("train_lshot")
    settings = {"proto_rect": True, "meta_val_way": WAY, "lshot": True, "lmd": 0.7, "knn": 3, "num_NN": 1}
    theirs.args = Namespace(**settings, plot_converge=False)  # type: ignore[attr-defined]  # a global there
    rows = case.support.unflatten(1, (case.shot, WAY)).transpose(1, 2).flatten(1, 2).numpy()
    labels = np.arange(WAY).repeat(case.shot)
    mean, of_query = case.mean.numpy(), case.label(case.query)[0].numpy()
    update, found = theirs.bound_update, []

    def keep(*arguments: Any) -> Any:
        found.append(update(*arguments))
        return found[-1]

    theirs.bound_update = keep  # type: ignore[attr-defined]  # what it returns are the predictions
    for pair in zip(rows, case.query.numpy(), strict=True):
        theirs.metric_class_type(*pair, labels, of_query, case.shot, train_mean=mean)
    theirs.bound_update = update  # type: ignore[attr-defined]
    return found


def run_script(case: Case, file: Path, changes: Mapping[str, str]) -> tuple[dict[str, Any], Tensor]:
    """Run a script of PT-MAP's kind but for its main part; return its names, and the rows that it begins with.

    10,000 episodes and the GPU are written into some; ``changes`` are further ones of the text.
    """
    n, n_support, n_queries = len(case.support), case.support.shape[1], case.query.shape[1]
    text = file.read_text(encoding="utf-8")
    for old, new in {"repeat(10000": f"repeat({n}", "'cuda'": "'cpu'", **changes}.items():
        text = text.replace(old, new)
    labels = torch.cat([case.label(case.support), case.label(case.query)], dim=1)
    theirs: dict[str, Any] = {"__name__": "theirs", "labels": labels, "n_lsamples": n_support, "n_usamples": n_queries}
    theirs |= {"n_runs": n, "n_shot": case.shot, "n_ways": WAY, "n_queries": n_queries // WAY}
    exec(compile(text, str(file), "exec"), theirs)
    return theirs, torch.pow(torch.cat([case.support, case.query], dim=1) + 1e-6, 0.5)


def run_proto_lp(case: Case, changes: Mapping[str, str]) -> Any:
    """Run protoLP's script as its own main part does."""
    theirs, rows = run_script(case, Path("test_standard_GSSL_lapshot.py"), changes)
    n, n_support, n_queries = len(case.support), case.support.shape[1], case.query.shape[1]
    rows = theirs["scaleEachUnitaryDatas"](rows)
    rows = theirs["centerDatas"](theirs["SVDreduction"](rows, 40))
    model = theirs["GaussianModel"](WAY, 10)
    model.initFromLabelledDatas(rows, n, case.shot, n_queries // WAY, WAY, rows.shape[2])
    sizes = n, WAY, n_queries, n_support
    theirs["MAP"](0.2).loop(model, rows, *sizes, n_epochs=100)
    found = model.getProbas(rows, *sizes)[:, n_support:]
    return found.argmax(dim=2).where(found.isfinite().all(dim=2), NOTHING)


def run_pt_map(case: Case, file: Path) -> float:
    """Run PT-MAP's own script as its main part does, all episodes at once, and return the mean accuracy."""
    theirs, rows = run_script(case, file, {})
    rows = theirs["QRreduction"](rows)
    theirs["n_nfeat"] = rows.shape[2]
    theirs["ndatas"] = theirs["centerDatas"](theirs["scaleEachUnitaryDatas"](rows))
    model = theirs["GaussianModel"](WAY, 10)
    model.initFromLabelledDatas()
    return float(theirs["MAP"](0.2).loop(model, 20)[0])


def run_ilpc(case: Case) -> Any:
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
        # Labels of queries are only returned, in the order of the predictions: here they are the queries' numbers.
        pairs = own[:n_support], case.label(case.support)[0], own[n_support:], torch.arange(n_queries)
        order, guess = theirs.iter_balanced_trans(opt, *pairs, n_support)
        found.append(np.asarray(guess)[np.argsort(order)])
    return found


def run_calibration(case: Case, seed: int) -> Any:
    """Run the function of distribution calibration as its script does; what it samples is random."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - few need it

    theirs = importlib.import_module("evaluate_DC")
    classes = [case.base[case.base_labels == each].numpy() for each in case.base_labels.unique()]
    means, covariances = [each.mean(axis=0) for each in classes], [np.cov(each.T) for each in classes]
    generator, found = np.random.RandomState(seed), []
    factors: dict[bytes, Array] = {}  # of covariances, most of which come again
    labels = case.label(case.support)[0].numpy()
    for support, query in zip(case.support.sqrt().numpy(), case.query.sqrt().numpy(), strict=True):
        count = 750 // case.shot
        rows = [support]
        for row in support:
            mean, covariance = theirs.distribution_calibration(row, means, covariances, k=2)
            key = hashlib.sha256(covariance).digest()
            if key not in factors:  # what numpy.random.multivariate_normal takes
                _, size, basis = np.linalg.svd(covariance)
                factors[key] = np.sqrt(size)[:, None] * basis
            rows.append(mean + generator.standard_normal((count, len(mean))) @ factors[key])
        fitted = LogisticRegression(max_iter=1000).fit(np.concatenate(rows), [*labels, *labels.repeat(count)])
        found.append(fitted.predict(query))
    return found


def run_metaopt(case: Case) -> Any:
    """Run MetaOptNet's head, with the solver that it imports from a folder beside it."""
    sys.path.insert(1, str(Path("../qpth").resolve()))
    theirs = importlib.import_module("models.classification_heads")
    labels = case.label(case.support)
    logits = theirs.MetaOptNetHead_SVM_CS(case.query, case.support, labels, WAY, case.shot)
    return logits.argmax(dim=2)


def run_oslo(case: Case) -> Any:
    """Run OSLO, called OSEM there, on rows that are centred and scaled as its Makefile says; no query is open."""
    for name in ("src.all_in_one", "src.transforms", "easyfsl"):  # whose other modules need much else
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [name.replace(".", "/")]
    utils: Any = types.ModuleType("easyfsl.utils")
    utils.compute_prototypes = lambda rows, labels: torch.stack([rows[labels == c].mean(dim=0) for c in range(WAY)])
    sys.modules["easyfsl.utils"] = utils
    theirs = importlib.import_module("src.all_in_one.osem")
    transforms = importlib.import_module("src.transforms.abstract")
    theirs.precision_recall_curve = lambda *_: (0.0, 0.0, 0.0)  # type: ignore[attr-defined]  # of open queries
    theirs.auc_fn = lambda *_: 0.0  # type: ignore[attr-defined]
    labels, asked = case.label(case.support)[0], case.label(case.query)[0]
    found = []
    for pair in zip(case.support, case.query, strict=True):
        rows = transforms.L2norm()(*transforms.MeanCentering()(*pair))
        metrics: Any = {part: defaultdict(list) for part in ("main_metrics", "secondary_metrics")}
        told = {"outliers": torch.zeros_like(asked), "query_labels": asked, "intra_task_metrics": metrics}
        model = theirs.OSEM(inference_steps=2, lambda_s=0.05, lambda_z=0.1)
        found.append(model(*rows, labels, **told)[1].argmax(dim=1))
    return torch.stack(found)


def run_semi_kmeans(case: Case, name: str, *, once: bool = False) -> Any:
    """Run a model of semi-supervised k-means by the settings of ours: theirs are learned.

    ``once`` multiplies by the mask once, as the paper has it.
    """
    sys.modules["tensorflow"] = Graph()
    logger: Any = types.ModuleType("fewshot.utils.logger")
    logger.get = lambda: None
    sys.modules["fewshot.utils.logger"] = logger
    theirs: Any = importlib.import_module(f"fewshot.models.kmeans_refine_{name}model")
    theirs.concat = lambda parts, axis: torch.cat(list(parts), dim=axis)
    theirs.FLAGS = Namespace(learn_radius=False, init_radius=1.0)
    theirs.eval_distractor = lambda *_: (0, 0, 0)
    # In place of the network that looks at distances: a threshold of 1 with a slope of 10.
    theirs.mlp = lambda rows, *_, **__: torch.tensor([1.0, 1.0, 10.0]).log().expand(len(rows), 3)
    if once:
        assign = sys.modules["fewshot.models.kmeans_utils"].assign_cluster
        theirs.assign_cluster_soft_mask = lambda means, rows, mask: (assign(means, rows), mask)
    model = getattr(theirs, f"KMeansRefine{name.strip('_').title()}Model")
    labels, found = case.label(case.support)[:1], []
    hot = F.one_hot(labels, WAY).transpose(1, 2) / case.shot
    for each in zip(case.support, case.unlabelled, case.query, strict=True):  # one episode is all that masks are for
        rows = [own[None] for own in each]
        given: dict[str, Any] = {"nway": WAY, "config": Namespace(num_cluster_steps=1), "y_train": labels}
        given |= {"x_train": None, "x_unlabel": None, "x_test": None, "_x_unlabel": rows[1], "y_unlabel": None}
        given["get_encoded_inputs"] = lambda *_, rows=rows: rows
        given["_compute_protos"] = lambda _, support, __: hot @ support
        found.append(model.predict(Namespace(**given))[-1][0, :, :WAY].argmax(dim=1))
    return torch.stack(found)


def run_frn(case: Case) -> Any:
    """Run FRN's reconstruction at the numbers that its training begins with, on features scaled as for ResNet-12."""
    theirs = importlib.import_module("models.FRN").FRN
    zero, found = torch.zeros(()), []
    for pair in case.pair_maps():
        support, query = (maps.flatten(2).transpose(1, 2) / maps.shape[1] ** 0.5 for maps in pair)
        pools = support.unflatten(0, (case.shot, WAY)).transpose(0, 1).flatten(1, 2)  # (way, shot * places, channels)
        distances = theirs.get_recon_dist(None, query.flatten(0, 1), pools, zero, zero)
        found.append(distances.unflatten(0, query.shape[:2]).mean(dim=1).argmin(dim=1))
    return torch.stack(found)


def run_deepemd(case: Case) -> Any:
    """Run DeepEMD's head by OpenCV's solver, with the channels of the maps for the 640 that it has."""
    sys.path[1:1] = [str(Path("../qpth").resolve()), str(Path("Models").resolve())]
    theirs: Any = importlib.import_module("models.Network")
    text = Path("Models/models/Network.py").read_text(encoding="utf-8").replace("640", str(int(case.shape[0])))
    exec(compile(text, "Network.py", "exec"), vars(theirs))
    torch.cuda.LongTensor = torch.LongTensor  # type: ignore[attr-defined]
    args = Namespace(shot=case.shot, way=WAY, solver="opencv", temperature=12.5, norm="center", metric="cosine")
    args.sfc_lr, args.sfc_update_step, args.sfc_bs = 100, 100, 4
    model = theirs.DeepEMD.__new__(theirs.DeepEMD)
    torch.nn.Module.__init__(model)
    model.args = args
    model.eval()
    found = []
    for support, query in case.pair_maps():
        torch.manual_seed(0)
        classes = model.get_sfc(support) if case.shot > 1 else support
        with torch.no_grad():
            found.append(model.emd_forward_1shot(classes, query).argmax(dim=1))
    return torch.stack(found)


def run_deepbdc(case: Case) -> Any:
    """Run DeepBDC's matrices and its prototypes, without its layer that reduces channels."""
    module = importlib.import_module("methods.bdc_module").BDC(input_dim=case.shape.tolist())
    compare = importlib.import_module("methods.meta_deepbdc").MetaDeepBDC.metric
    found = []
    with torch.no_grad():
        for support, query in case.pair_maps():
            means = module(support).unflatten(0, (case.shot, WAY)).mean(dim=0)
            found.append(compare(Namespace(n_support=case.shot), module(query), means).argmax(dim=1))
    return torch.stack(found)


def run_ctx(case: Case) -> Any:
    """Run CrossTransformers' attention and distances, with features for keys and values."""
    text = Path("meta_dataset/learners/metric_learners.py").read_text(encoding="utf-8")
    text = text.partition("class CrossTransformerLearner(MetricLearner):")[2].partition("@gin.configurable")[0]
    text = text.replace("@tf.custom_gradient", "").replace("v_agg.set_shape", "len")  # which tensors of torch lack
    names: dict[str, Any] = {"tf": Graph()}
    exec(compile(f"class Learner:{text}", "metric_learners.py", "exec"), names)
    learner, labels = names["Learner"].__new__(names["Learner"]), case.label(case.support)[0]
    found = []
    for pair in case.pair_maps():
        support, query = (maps.permute(0, 2, 3, 1) for maps in pair)
        found.append(learner._get_dist(query, query, support, support, labels).argmin(dim=0))
    return torch.stack(found)


def run_in_double(run: Callable[[Case], Any], case: Case) -> Any:
    """Run in double precision."""
    torch.set_default_dtype(torch.float64)
    try:
        return run(Case(*(each.double() if each.is_floating_point() else each for each in case)))
    finally:
        torch.set_default_dtype(torch.float32)


def run_few(run: Callable[[Case], Any], case: Case) -> Array:
    """Run on the first episodes alone: others get ``NOTHING``."""
    rows = {name: getattr(case, name)[:FEW] for name in ("support", "query", "unlabelled")}
    found = np.full(case.query.shape[:2], NOTHING)
    found[:FEW] = np.asarray(run(case._replace(**rows)))
    return found


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
    "protoLP": lambda case: run_proto_lp(case, {}),
    "iLPC": run_ilpc,
    "distribution calibration": lambda case: run_calibration(case, 0),
    "MetaOptNet": run_metaopt,
    "alpha-AM": lambda case: run_task(case, "ALPHA_AM", "src.methods.AM", **MANIFOLD, **COMMON, **ENTROPIES),
    "OSLO": run_oslo,
    "semi-supervised k-means": lambda case: run_semi_kmeans(case, ""),
    "k-means with distractors": lambda case: run_semi_kmeans(case, "radius_"),
    "k-means with masks": lambda case: run_semi_kmeans(case, "mask_"),
    "FRN": run_frn,
    "DeepEMD": run_deepemd,
    "DeepBDC": run_deepbdc,
    "CrossTransformers": run_ctx,
}
#: What their own predictions are compared with, where that shows why ours are others: nearer to convergence, other
#: random numbers, what the paper says, and double precision.
AGAIN: dict[str, Callable[[Case], Any]] = {
    "protoLP": lambda case: run_proto_lp(case, {"> 0.01": "> 1e-6", "epsilon=1e-3": "epsilon=1e-6"}),
    "distribution calibration": partial(run_few, lambda case: run_calibration(case, 1)),
    "k-means with masks": lambda case: run_semi_kmeans(case, "mask_", once=True),
    "alpha-AM": partial(run_few, partial(run_in_double, RUNS["alpha-AM"])),
}


#: Those that take powers of features; of negative ones these are no numbers, which would count as the first class.
POWERS = {"PT-MAP", "protoLP", "distribution calibration"}


def main(folder: str, name: str, *files: str) -> None:
    """Write predictions (2, episodes, queries) for each file of episodes and file to write.

    The second ones are those of ``AGAIN``, or the same.
    """
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.path[0] = str(Path.cwd())
    with stand_in():
        for episodes, out in zip(files[::2], files[1::2], strict=True):
            with np.load(episodes) as arrays:
                case = Case(*(torch.from_numpy(arrays[each]) for each in Case._fields))
            if name in POWERS and bool((case.support < 0).any() | (case.query < 0).any()):
                found = np.full((2, *case.query.shape[:2]), NOTHING)
            else:
                first = np.asarray(RUNS[name](case))
                found = np.stack([first, np.asarray(AGAIN[name](case)) if name in AGAIN else first])
            np.save(out, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
