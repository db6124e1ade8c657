"""``info`` and ``--version``: the contents of a model file as text and as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protonet import PrototypeNetwork, solve
from protonet.files import Model, load_model, save_model
from protonet.files.archive import FORMAT_VERSION, check_entry_types, read_config
from tests.commands.cases import FAST, Run
from tests.model_cases import join_archive, split_archive
from tests.strategies import blobs

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = {"rows": 12, "accuracy": 0.75, "interval": [0.5, 0.875], "log_loss": 0.5, "calibration_error": 0.125}


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    return blobs(0, classes=3, rows=4, dim=3)


@pytest.fixture(scope="module")
def network(data: tuple[Tensor, Tensor]) -> PrototypeNetwork:
    return solve([data], effort="fast")


def write_model(path: Path, network: PrototypeNetwork, facts: dict[str, Any], names: Any = ("a", "b", "c")) -> str:
    save_model(path, Model(network=network, classes=tuple(names), columns=("w", "x", "\x1b[31mz"), metadata=facts))
    return str(path)


def test_info_repeats_the_results_of_fit(tmp_path: Path, data: tuple[Tensor, Tensor], run: Run) -> None:
    x, y = data
    groups = [f"owner {row % 5}" for row in range(len(y))]
    rows = zip(x.tolist(), y.tolist(), groups, strict=True)
    lines = [f"{a},{b},{c},class {label},{group},r{index},0" for index, ((a, b, c), label, group) in enumerate(rows)]
    table, path = tmp_path / "t.csv", tmp_path / "m.safetensors"
    table.write_text("\n".join(["a,b,c,kind,owner,name,note", *lines]))
    options = ["--group", "owner", "--id", "name", "--drop", "note", "--seed", "7", "--time-limit", "900"]
    summary = run("fit", table, *FAST, *options, "--verbose", "-o", path)
    assert "time limit" not in summary
    model, facts = load_model(path), json.loads(run("info", path, "--json"))
    assert facts["classes"] == [{"name": f"class {index}", "samples": 4} for index in range(3)]
    assert (facts["samples"], facts["features"], facts["columns"]) == (12, 3, ["a", "b", "c"])
    assert facts["dropped"] == ["owner", "name", "note"]
    fitted = [facts[name] for name in ("label", "effort", "seed", "time_limit", "group", "groups", "id")]
    assert fitted == ["kind", "fast", 7, 900, "owner", len(set(groups)), "name"]
    assert facts["parameters"] == model.network.count_parameters()
    assert facts["buffer_elements"] == model.network.count_buffer_elements()
    assert (facts["bytes"], facts["version"]) == (path.stat().st_size, FORMAT_VERSION)
    assert facts["library"] == metadata.version("protonet-solver")
    assert sum(facts["views"].values()) == pytest.approx(1)
    assert facts["cross_validation"]["confusion"] == model.metadata["held_out"]["confusion"]
    output = run("info", path)
    assert output.startswith("m.safetensors: 3 classes, 12 samples, 3 features, 5 groups\n")
    for heading, value in (("label", "kind"), ("seed", "7"), ("groups by", "owner"), ("time limit, s", "900.0")):
        assert re.search(rf"^  {heading} +{value}$", output, re.MULTILINE)
    assert re.search(r"^  dropped +owner, name, note$", output, re.MULTILINE)
    assert "| class 0 | 4       |" in output
    assert summary.split("\n\n")[1] in output  # the views
    accuracy = 100 * facts["cross_validation"]["accuracy"]
    assert f"cross-validation on 12 rows: accuracy {accuracy:.2f} %, 95 % interval [" in output


def test_names_are_printed_without_control_characters(tmp_path: Path, network: PrototypeNetwork, run: Run) -> None:
    facts = {"label": "\x1b]0;x\x07", "views": {"\x1b[1m": 1.0}, "left_out": ["\r"], "id": "\x08", "held_out": HELD_OUT}
    path = write_model(tmp_path / "m.safetensors", network, facts, ("a\x1b", "b\nc", "d"))
    output = run("info", path)
    assert all(item.isprintable() for item in output.replace("\n", ""))
    assert "| b\\nc " in output
    assert "accuracy 75.00 %, 95 % interval [50.00, 87.50], log-loss 0.500, calibration " in output
    assert [item["name"] for item in json.loads(run("info", path, "--json"))["classes"]] == ["a\x1b", "b\nc", "d"]


@pytest.mark.parametrize(
    "facts",
    [
        {"views": [1], "held_out": 3, "left_out": "x", "groups": 1, "folds": {}},
        {"views": {"a": "b"}, "held_out": {**HELD_OUT, "rows": "x"}, "seed": [1], "effort": {}},
        {"held_out": {**HELD_OUT, "interval": [0.5]}},
    ],
)
def test_unexpected_metadata_are_no_error(
    facts: dict[str, Any], tmp_path: Path, network: PrototypeNetwork, run: Run
) -> None:
    path = write_model(tmp_path / "m.safetensors", network, facts)
    output = run("info", path)
    assert output.startswith("m.safetensors: 3 classes, 12 samples, 3 features\n")
    assert output.endswith("cross-validation: none\n")
    read = json.loads(run("info", path, "--json"))
    invalid = ("views", "cross_validation", "dropped", "groups", "cross_validation_networks")
    assert all(read[name] is None for name in invalid)


def test_version_of_the_script_and_of_the_module() -> None:
    entry = re.search(r'^\[project\.scripts\]\nprotonet = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert entry is not None
    module, name = entry.groups()
    as_script = f"import sys, {module}; sys.argv[0] = 'protonet'; sys.exit({module}.{name}())"
    version = f"protonet {metadata.version('protonet-solver')}\n"
    for way in (["-m", "protonet"], ["-c", as_script]):
        words = [sys.executable, *way, "--version"]
        output = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (output.returncode, output.stdout, output.stderr) == (0, version, "")


def test_an_inconsistent_header_is_refused(tmp_path: Path, network: PrototypeNetwork, run: Run) -> None:
    path = tmp_path / "m.safetensors"
    write_model(path, network, {})
    config, content = read_config(path), path.read_bytes()
    check_entry_types(config)
    changes: list[dict[str, Any]] = [
        *({"counts": value} for value in ([None, 1, 2], [7, 7])),
        *({"parameters": value} for value in (-5, "x")),
        *({"columns": value} for value in (True, [None])),
        *({name: None} for name in ("buffer_elements", "classes", "network")),
        *({"column_summaries": [[1]]}, {"library": 5}),
    ]
    for change in changes:
        for wrong in (config | change, {name: value for name, value in config.items() if name not in change}):
            with pytest.raises(ValueError, match="a config with entries of other types"):
                check_entry_types(wrong)
        path.write_bytes(join_archive(config | change, split_archive(content)[1]))
        assert "`model` must be a model file" in run("info", path, code=2)


def test_damaged_configs_and_pipes_are_errors(tmp_path: Path, network: PrototypeNetwork, run: Run) -> None:
    path = tmp_path / "m.safetensors"
    save_model(path, Model(network=network, classes=("a", "b", "c"), update_state={"labels": torch.arange(1000)}))
    content = path.read_bytes()
    path.write_bytes(content[:99] + bytes([content[99] ^ 9]) + content[100:])
    assert "`model` must be a model file" in run("info", path, code=2)
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in run("info", tmp_path / "pipe", code=2)
