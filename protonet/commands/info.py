"""``protonet info``: what is in a model file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protonet._text import to_printable
from protonet.commands.figures import (
    MOST_CLASSES,
    count_own,
    format_losses,
    format_share,
    format_views,
    list_names,
    tell_columns,
)
from protonet.commands.options import check_model_path
from protonet.errors import raise_input_error
from protonet.files.archive import VERSION, check_facts, read_config
from protonet.ui.text import count, format_table

#: What the metadata say of the fit, each with its heading.
FIT = {
    "label": "label",
    "effort": "effort",
    "seed": "seed",
    "time_limit": "time limit, s",
    "group": "groups by",
    "id": "id",
    "balanced": "balanced",
}
#: Most columns that are named; JSON has all.
MOST_COLUMNS = 20


def run(options: argparse.Namespace) -> None:
    """Print what is in the file that the arguments name.

    Raises:
        MissingPackageError: safetensors is missing.
        InputError: Arguments that do not fit, or no model.
    """
    path = Path(options.model)
    check_model_path(path)
    facts = describe_model(path, read_header(path))
    print(json.dumps(facts, indent=1) if options.json else format_facts(facts))


def read_header(path: Path) -> dict[str, Any]:
    """Return the config of a model file, without reading its tensors.

    Raises:
        InputError: No model file of this version.
    """
    try:
        config = read_config(path)
        check_facts(config)
    except (OSError, RuntimeError, ValueError) as error:
        raise_input_error(
            "model", f"be a model file of version {VERSION}", f"{path} ({error})", "Pass a file that fit wrote."
        )
    return config


def describe_model(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is in a model file as JSON can hold it; what the file does not say, or says oddly, is None.

    Args:
        path: Of the file.
        header: Its header.
    """
    metadata, classes = header["metadata"], header["classes"]
    samples = count_own(header["counts"], classes, metadata.get("named"))
    left_out, groups = (metadata.get(name) for name in ("left_out", "groups"))
    views = metadata.get("views")
    sound = isinstance(views, dict) and all(isinstance(weight, float) for weight in views.values())
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "version": header["version"],
        "library": header["library"],
        "samples": sum(samples),
        "classes": [{"name": name, "samples": n} for name, n in zip(classes, samples, strict=True)],
        "features": header["network"]["input_dim"],
        "columns": header["columns"],
        "held": tell_columns(header["columns"], header["told"]),
        "left_out": left_out if isinstance(left_out, list) else None,
        **{name: metadata.get(name) for name in FIT},
        "groups": len(groups) if isinstance(groups, dict) else None,
        "names": metadata.get("named") if isinstance(metadata.get("named"), dict) else None,
        "views": views if sound else None,
        "parameters": header["parameters"],
        "buffer_elements": header["buffer_elements"],
        "fold_models": len(header["folds"]) or None,
        "held_out": _check_figures(metadata.get("held_out")),
    }


def _check_figures(figures: Any) -> dict[str, Any] | None:
    """Return figures of held-out rows, or None if they are none."""
    numbers = ("rows", "accuracy", "log_loss", "calibration_error")
    if not isinstance(figures, dict) or not all(isinstance(figures.get(name), int | float) for name in numbers):
        return None
    intervals = {name: value for name, value in figures.items() if name.endswith("interval")}
    sound = all(
        isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, float) for end in ends)
        for ends in intervals.values()
    )
    return figures if sound and "interval" in intervals else None


def format_facts(facts: Mapping[str, Any]) -> str:
    """Return what a person should know of `describe_model`, in lines; names without control characters."""
    classes, columns = facts["classes"], facts["columns"]
    sizes = [
        count(len(classes), "class"),
        count(facts["samples"], "sample"),
        count(facts["features"], "feature"),
        *([count(facts["groups"], "group")] if facts["groups"] else []),
    ]
    of_fit = {heading: facts[name] for name, heading in FIT.items() if facts[name] is not None}
    of_fit["columns"] = None if columns is None or facts["held"] else list_names(columns, MOST_COLUMNS)
    of_fit["left out"] = list_names(list(map(str, facts["left_out"] or ())), MOST_COLUMNS) or None
    if facts["names"]:
        names, weight = facts["names"].get("classes"), facts["names"].get("weight")
        if isinstance(names, list) and isinstance(weight, float):
            of_fit["names"] = f"of {count(len(names), 'class')}, each as {weight:g} samples beside these"
    of_fit["parameters"] = f"{facts['parameters']:,} trained, {facts['buffer_elements']:,} numbers in buffers"
    folds = f", with {count(facts['fold_models'], 'fold model')}" if facts["fold_models"] else ""
    of_fit["size"] = f"{facts['bytes'] / 1e6:.1f} MB{folds}"
    of_fit["version"] = f"{facts['version']} of the file, written by protonet {facts['library']}"
    lines = [f"{to_printable(facts['file'])}: {', '.join(sizes)}"]
    lines += [f"  {heading:<15}{to_printable(value)}" for heading, value in of_fit.items() if value is not None]
    lines += [f"  {line}" for line in facts["held"]]
    rows = [[to_printable(each["name"]), f"{each['samples']:,}"] for each in classes[:MOST_CLASSES]]
    lines += ["", format_table(["class", "samples"], rows).rstrip()]
    if len(classes) > MOST_CLASSES:
        lines.append(f"the first {MOST_CLASSES} of {count(len(classes), 'class')}; --json has all")
    if facts["views"]:
        lines += ["", format_views({to_printable(name): weight for name, weight in facts["views"].items()}).rstrip()]
    return "\n".join([*lines, "", _format_figures(facts["held_out"])])


def _format_figures(figures: Mapping[str, Any] | None) -> str:
    """Return a line of the figures of held-out rows."""
    if figures is None:
        return "held out: no row"
    right, interval = format_share(figures["accuracy"], figures["interval"])
    rows = count(figures["rows"], "row")
    balanced, frequent = (figures.get(name) for name in ("balanced_accuracy", "most_frequent_class"))
    beside = ""
    if isinstance(balanced, float) and isinstance(frequent, float):  # older files have none
        beside = f"balanced accuracy {100 * balanced:.2f} %, the most frequent class alone {100 * frequent:.2f} %, "
    return f"held out: {right} % of {rows} right, 95 % interval {interval}, {beside}{format_losses(figures).rstrip()}"
