"""Compatibility with easyfsl 1.5.0, the library that few-shot experiments are compared with.

Its packages import torchvision and pandas, which classifiers of saved features do not need. Its sampler passes an
argument that current torch rejects. So modules are loaded without the ``__init__`` of their packages, and the sampler
without its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from protonet.errors import optional_packages

INSTALL = "pip install --no-deps easyfsl==1.5.0"


def load_easyfsl(module: str) -> Any:
    """Import a module of easyfsl, such as ``methods.tim``, without its package."""
    with optional_packages(install=INSTALL):
        easyfsl = importlib.import_module("easyfsl")
    name = f"easyfsl.{module.partition('.')[0]}"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [f"{folder}/{module.partition('.')[0]}" for folder in easyfsl.__path__]
        sys.modules[name] = package
    return importlib.import_module(f"easyfsl.{module}")


def make_loader(x: Tensor, labels: Tensor, *, n_way: int, n_shot: int, n_query: int, n_tasks: int) -> Any:
    """Build easyfsl's loader of episodes of rows x (n, dim), as in its documentation."""
    parent: Any = load_easyfsl("datasets.few_shot_dataset").FewShotDataset
    sys.modules["easyfsl.datasets"].FewShotDataset = parent  # type: ignore[attr-defined]  # what its __init__ would do
    task_sampler = load_easyfsl("samplers.task_sampler").TaskSampler

    classes = labels.tolist()

    class Rows(parent):  # type: ignore[misc]
        """A data set as easyfsl's FeaturesDataset, without pandas."""

        def __getitem__(self, item: int) -> tuple[Tensor, int]:
            return x[item], classes[item]

        def __len__(self) -> int:
            return len(classes)

        def get_labels(self) -> list[int]:
            return classes

    sampler = task_sampler.__new__(task_sampler)
    sampler.n_way, sampler.n_shot, sampler.n_query, sampler.n_tasks = n_way, n_shot, n_query, n_tasks
    sampler.items_per_label = {}
    for item, label in enumerate(classes):
        sampler.items_per_label.setdefault(label, []).append(item)
    return DataLoader(Rows(), batch_sampler=sampler, num_workers=0, collate_fn=sampler.episodic_collate_fn)
