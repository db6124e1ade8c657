"""What the solver is compared with: one function a method, from a draw to predictions for its test rows.

All learn from train and validation samples together but the statement's example MLP, which the statement
trains on the train samples alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from analysis.bayes import predict_bayes
from protonet.datasets import Split
from protonet.losses import class_means

HIDDEN, EPOCHS = 384, 50  # the statement's example
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)  # inverse penalties tried for logistic regression
FOLDS = 5


def pool_labelled(split: Split) -> tuple[Tensor, Tensor]:
    """Return train and validation samples together: features (n, dim) and labels (n,)."""
    return torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])


def predict_nearest_mean(split: Split) -> Tensor:
    """Return the class of the nearest class mean, Euclidean, for each test row (n_test_rows,)."""
    means = class_means(*pool_labelled(split), split.num_classes)[0]
    return torch.cdist(split.test_x, means).argmin(dim=1)


def predict_cosine(split: Split) -> Tensor:
    """Return the class whose mean has the largest cosine, for each test row (n_test_rows,)."""
    means = class_means(*pool_labelled(split), split.num_classes)[0]
    return (split.test_x @ nn.functional.normalize(means, dim=1).T).argmax(dim=1)


def predict_mlp(split: Split) -> Tensor:
    """Return the predictions (n_test_rows,) of the statement's example MLP, trained on train as it says.

    Global random state is left as it was found; inside, it is seeded as the contest seeds it.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(2025)
        loader = DataLoader(TensorDataset(split.train_x, split.train_y), batch_size=128, shuffle=True)
        dim, num_classes = split.train_x.shape[1], split.num_classes
        model = nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, num_classes))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(EPOCHS):
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
    with torch.no_grad():
        return torch.as_tensor(model(split.test_x).argmax(dim=1))


def predict_lda(split: Split) -> Tensor:
    """Return the predictions (n_test_rows,) of linear discriminant analysis, covariance shrunken.

    Source: scikit-learn, with Ledoit and Wolf's (2004) shrinkage of the pooled within-class covariance, which
        is more accurate here than scikit-learn's own choice, class by class.
    """
    from sklearn.covariance import ledoit_wolf_shrinkage  # noqa: PLC0415 - optional
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis  # noqa: PLC0415

    x, y = pool_labelled(split)
    residuals = x - class_means(x, y, split.num_classes)[0][y]
    shrinkage = ledoit_wolf_shrinkage(residuals.double().numpy(), assume_centered=True)
    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=float(shrinkage))
    model.fit(x.double().numpy(), y.numpy())
    return torch.from_numpy(model.predict(split.test_x.double().numpy()))


def predict_logistic(split: Split) -> Tensor:
    """Return the predictions (n_test_rows,) of logistic regression, its penalty cross-validated.

    Features are standardised; the penalty with the best accuracy over stratified folds wins.

    Source: scikit-learn.
    """
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - optional
    from sklearn.model_selection import KFold, StratifiedKFold  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    x, y = (part.numpy() for part in pool_labelled(split))
    scaler = StandardScaler().fit(x)
    x = scaler.transform(x)
    most = int(np.bincount(y).max())
    kind = StratifiedKFold if most > 1 else KFold
    right = np.zeros(len(STRENGTHS))
    with warnings.catch_warnings():  # small classes, and fits that their steps leave unfinished
        warnings.simplefilter("ignore")
        for fitted, held in kind(max(2, min(FOLDS, most)), shuffle=True, random_state=0).split(x, y):
            model = LogisticRegression(warm_start=True)  # each strength starts where the last one ended
            for position, strength in enumerate(STRENGTHS):
                model.set_params(C=strength).fit(x[fitted], y[fitted])
                right[position] += (model.predict(x[held]) == y[held]).sum()
        best = LogisticRegression(C=STRENGTHS[int(right.argmax())]).fit(x, y)
    return torch.from_numpy(best.predict(scaler.transform(split.test_x.numpy())))


def predict_limit(split: Split) -> Tensor | None:
    """Return the Bayes rule's predictions (n_test_rows,), or None where it is not known."""
    return None if split.noise_covariance is None else predict_bayes(split)


METHODS: dict[str, Callable[[Split], Tensor | None]] = {
    "nearest_mean": predict_nearest_mean,
    "cosine": predict_cosine,
    "mlp": predict_mlp,
    "lda": predict_lda,
    "logistic": predict_logistic,
    "bayes": predict_limit,
}
