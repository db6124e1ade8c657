"""Data sets: published benchmarks, your own files, printed characters, and synthetic data."""

from protonet.datasets.benchmarks import load_benchmark
from protonet.datasets.dataset import Dataset, split_classes
from protonet.datasets.features import load_features
from protonet.datasets.files import load_csv, load_digits, load_npz
from protonet.datasets.glyphs import load_glyphs
from protonet.datasets.synthetic import FAMILIES, Split, sample_family

__all__ = [
    "FAMILIES",
    "Dataset",
    "Split",
    "load_benchmark",
    "load_csv",
    "load_digits",
    "load_features",
    "load_glyphs",
    "load_npz",
    "sample_family",
    "split_classes",
]
