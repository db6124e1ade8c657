"""Data sets, one per file: those that the library is measured on, and your own."""

from protonet.datasets.cifar_fs import load_cifar_fs
from protonet.datasets.class_lists import load_meta_dataset
from protonet.datasets.cub import load_cub
from protonet.datasets.dataset import Dataset, split_classes
from protonet.datasets.digits import load_digits
from protonet.datasets.fc100 import load_fc100
from protonet.datasets.features import load_features
from protonet.datasets.files import load_csv, load_images, load_npz
from protonet.datasets.glyphs import load_glyphs
from protonet.datasets.mapped import map_npz
from protonet.datasets.mini_imagenet import load_mini_imagenet
from protonet.datasets.omniglot import load_omniglot
from protonet.datasets.synthetic import FAMILIES, Split, sample_family
from protonet.datasets.tiered_imagenet import load_tiered_imagenet

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
