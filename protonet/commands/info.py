"""``protonet info`` and ``export``: show the contents of a model file, without torch, and export a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from protonet._io import JsonDict
from protonet._text import plural, shorten_list, to_printable
from protonet.commands.options import ExportOptions, InfoOptions
from protonet.errors import raise_input_error
from protonet.files.archive import FORMAT_VERSION, check_entry_types, read_config
from protonet.files.metadata import TrainingMetadata, count_training_rows
from protonet.ui import text

#: The heading in the printed text of each option of ``fit`` in the result of `describe_model`.
FIT_OPTION_HEADINGS = {
    "label": "label",
    "seed": "seed",
    "time_limit": "time limit, s",
    "group": "groups by",
    "id": "id",
    "balanced": "balanced",
}
#: Maximum number of column names in the printed text; the JSON output lists all columns.
MAX_INFO_COLUMNS = 20


def run(options: InfoOptions) -> None:
    """Run ``info``: print the contents of a model file."""
    path = options.model
    try:
        config = read_config(path)
        check_entry_types(config)
    except (OSError, RuntimeError, ValueError) as error:
        must = f"be a model file of version {FORMAT_VERSION}"
        raise_input_error("model", must, f"{path} ({error})", "Pass a file that fit wrote.")
    contents = describe_model(path, config)
    print(json.dumps(contents, indent=1) if options.json else format_contents(contents))


def describe_model(path: Path, header: JsonDict) -> JsonDict:
    """Convert the config of a model file (``header``) to the dict of ``info --json``."""
    metadata, classes = TrainingMetadata.from_json(header["metadata"]), header["classes"]
    samples = count_training_rows(header["counts"], classes, metadata.class_names)
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "version": header["version"],
        "library": header["library"],
        "samples": sum(samples),
        "classes": [{"name": name, "samples": n} for name, n in zip(classes, samples, strict=True)],
        "features": header["network"]["input_dim"],
        "columns": header["columns"],
        "column_types": text.format_column_types(header["columns"], header["column_summaries"]),
        "dropped": list(metadata.dropped_columns),
        "label": metadata.label_column,
        "seed": metadata.seed,
        "time_limit": metadata.time_limit,
        "group": metadata.group_column,
        "id": metadata.id_column,
        "balanced": metadata.balanced or None,
        "groups": len(metadata.group_indices) or None,
        "class_names": None if metadata.class_names is None else asdict(metadata.class_names),
        "views": metadata.view_influences or None,
        "parameters": header["parameters"],
        "buffer_elements": header["buffer_elements"],
        "cross_validation_networks": len(header["folds"]) or None,
        "cross_validation": metadata.cross_validation,
    }


def format_contents(contents: JsonDict) -> str:
    """Format the result of `describe_model` as text; control characters of names are escaped."""
    classes, columns = contents["classes"], contents["columns"]
    sizes = [
        plural(len(classes), "class"),
        plural(contents["samples"], "sample"),
        plural(contents["features"], "feature"),
        *([plural(contents["groups"], "group")] if contents["groups"] else []),
    ]
    facts = {heading: contents[name] for name, heading in FIT_OPTION_HEADINGS.items() if contents[name] is not None}
    facts["columns"] = None if columns is None or contents["column_types"] else shorten_list(columns, MAX_INFO_COLUMNS)
    facts["dropped"] = shorten_list(contents["dropped"] or (), MAX_INFO_COLUMNS) or None
    if contents["class_names"]:
        names, weight = contents["class_names"]["classes"], contents["class_names"]["weight"]
        facts["class names"] = f"of {plural(len(names), 'class')}, each counts as {weight:g} further samples"
    facts["parameters"] = f"{contents['parameters']:,} trained, {contents['buffer_elements']:,} buffer elements"
    networks = contents["cross_validation_networks"]
    folds = f", with {plural(networks, 'cross-validation network')}" if networks else ""
    facts["size"] = text.format_byte_count(contents["bytes"]) + folds
    facts["version"] = f"file format {contents['version']}, written by protonet {contents['library']}"
    lines = [f"{to_printable(contents['file'])}: {', '.join(sizes)}"]
    lines += [f"  {heading:<15}{to_printable(value)}" for heading, value in facts.items() if value is not None]
    lines += [f"  {line}" for line in contents["column_types"]]
    rows = [[to_printable(one["name"]), f"{one['samples']:,}"] for one in classes[: text.MAX_LISTED_CLASSES]]
    lines += ["", text.format_table(["class", "samples"], rows).rstrip()]
    if len(classes) > text.MAX_LISTED_CLASSES:
        lines.append(f"the first {text.MAX_LISTED_CLASSES} of {plural(len(classes), 'class')}; --json has all")
    if contents["views"]:
        views = {to_printable(name): weight for name, weight in contents["views"].items()}
        lines += ["", text.format_view_influences(views).rstrip()]
    return "\n".join([*lines, "", _format_metrics(contents["cross_validation"])])


def _format_metrics(metrics: JsonDict | None) -> str:
    """Format the cross-validation metrics of a model file as a line; None means that the file has none."""
    if metrics is None:
        return "cross-validation: none"
    accuracy, interval = text.format_with_interval(metrics["accuracy"], metrics["interval"])
    parts = [f"cross-validation on {plural(metrics['rows'], 'row')}: accuracy {accuracy} %, 95 % interval {interval}"]
    balanced, frequent = (metrics.get(name) for name in ("balanced_accuracy", "most_frequent_class"))
    if isinstance(balanced, float) and isinstance(frequent, float):
        parts.append(f"balanced accuracy {100 * balanced:.2f} %, baseline (most frequent class) {100 * frequent:.2f} %")
    return ", ".join([*parts, text.format_probability_metrics(metrics).rstrip()])


def run_export(options: ExportOptions) -> None:
    """Run ``export``: write the ONNX file, the ``torch.export`` program, or both, and print a line about each file."""
    from protonet.files import export_onnx, export_pt2  # noqa: PLC0415 - imports torch
    from protonet.pipeline import TablePipeline  # noqa: PLC0415 - imports torch

    model = TablePipeline.load(options.model, argument="model")
    dim, classes = model.network.encoder.input_dim, len(model.classes)
    mixed = model.encoding is not None and not model.encoding.is_fully_numeric
    inputs = f"{len(model.encoding.columns)} columns (n, 1)" if mixed and model.encoding else f"features (n, {dim})"
    if options.onnx is not None:
        export_onnx(options.onnx, model, model.uninformative_logits)
    if options.pt2 is not None:
        export_pt2(options.pt2, model)
    for path, outputs in ((options.onnx, "logits and probabilities"), (options.pt2, "logits")):
        if path is not None:
            print(f"{path}: {inputs} to {outputs} (n, {classes}), {text.format_byte_count(path.stat().st_size)}")
