"""Data sets: loaders of published benchmarks, loaders of your own files, printed characters, and synthetic data."""

from protonet.datasets.benchmarks import (
    load_cifar_fs,
    load_cub,
    load_fc100,
    load_meta_dataset,
    load_mini_imagenet,
    load_omniglot,
    load_tiered_imagenet,
)
from protonet.datasets.dataset import Dataset, split_classes
from protonet.datasets.features import load_features
from protonet.datasets.files import load_csv, load_digits, load_images, load_npz, map_npz
from protonet.datasets.glyphs import load_glyphs
from protonet.datasets.synthetic import FAMILIES, Split, sample_family

__all__ = [
    "FAMILIES",
    "Dataset",
    "Split",
    "load_cifar_fs",
    "load_csv",
    "load_cub",
    "load_digits",
    "load_fc100",
    "load_features",
    "load_glyphs",
    "load_images",
    "load_meta_dataset",
    "load_mini_imagenet",
    "load_npz",
    "load_omniglot",
    "load_tiered_imagenet",
    "map_npz",
    "sample_family",
    "split_classes",
]
