"""Read class names and descriptions for ``fit --classes``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from protonet.errors import raise_input_error, renamed_arguments
from protonet.tables.columns.parsing import format_cells
from protonet.tables.formats import open_source
from protonet.tables.table import format_names

#: The columns of the file; the second is optional.
CLASS, DESCRIPTION = "class", "description"


def read_classes(path: Path) -> dict[str, str]:
    """Read class names and descriptions.

    Args:
        path: A table with a column ``class`` and, optionally, a column ``description``.

    Returns:
        The description of each class, "" for none, in the order of the file.

    Raises:
        MissingPackageError: A package that the file needs is missing.
        InputError: The file or the column does not exist; a name is empty or repeated.
    """
    with renamed_arguments(path="--classes"):
        source = open_source(path, names={CLASS})
        header = source.header or []
        if CLASS not in header:
            got = f"{path} with {format_names(header)}"
            raise_input_error("path", f"have a column {CLASS}", got, f"Name the columns {CLASS} and {DESCRIPTION}.")
        indices = [header.index(name) for name in (CLASS, DESCRIPTION) if name in header]
        blocks = [block.columns for block in source.read(indices)]
        columns = [format_cells(np.concatenate(parts)).tolist() for parts in zip(*blocks, strict=True)]
        names = columns[0] if columns else []
        if not names:
            raise_input_error("path", "name classes", f"{path} without rows", "Add a row for each class.")
        if "" in names:
            raise_input_error(
                "path", "name a class in each row", f"{path} with an empty name", "Fill it in, or remove the row."
            )
        if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise_input_error("path", "name each class once", f"{repeated[0]!r} repeatedly", "Remove the repetitions.")
    descriptions = columns[1] if len(columns) > 1 else [""] * len(names)
    return dict(zip(names, descriptions, strict=True))
