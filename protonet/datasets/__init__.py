"""Data sets, one a file: what the library is measured on."""

from protonet.datasets.synthetic import FAMILIES, Split, sample_family

__all__ = ["FAMILIES", "Split", "sample_family"]
