"""A new kind of view is one new file and one entry in one list: fitted, saved, loaded and exported with the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import protonet

#: One file: the distance of each feature from its mean separates classes that no linear view can. The specification,
#: the kind and the view follow the protocol of `protonet.views.view`, and nothing else of the library knows them.
TOY = '''"""Toy views: how far each feature is from its mean, to some power."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from protonet.views.onnx_graph import OnnxGraph
from protonet.views.evaluation import Candidate, CandidateEvaluator, ViewFamily
from protonet.views.config import Config, bounded_field
from protonet.views.view import LinearMap, InputMap, TrainingRows, ViewSpec, View


@dataclass(frozen=True)
class Toy:
    """A toy view."""

    power: float
    source: ClassVar[ViewSpec | None] = None
    use_shifts: ClassVar[bool] = False
    is_trained: ClassVar[bool] = False
    tags: ClassVar[frozenset[str]] = frozenset()  # none that the prior knows

    @property
    def name(self) -> str:
        """The power."""
        return f"toy to the power of {self.power}"

    def fit(self, rows: TrainingRows, source: InputMap | None = None) -> ToyView:
        """Take the means."""
        mean = rows.features.mean(dim=0)
        return ToyView(ToyConfig(len(mean), self.power), None, {"mean": mean})


@dataclass(frozen=True)
class ToyFamily(ViewFamily):
    """Toy views of some powers."""

    powers: tuple[float, ...] = (1.0, 2.0)
    progress_name: ClassVar[str] = "toy views"

    def without_validation(self) -> None:
        """Return nothing."""

    def candidates(self, evaluator: CandidateEvaluator) -> Iterator[Candidate]:
        """Judge each power."""
        for power in self.powers:
            evaluator.fit(Toy(power))  # as if others read it: the learned views must not
            candidate = evaluator.evaluate(Toy(power))
            if candidate is not None:
                yield candidate


@dataclass(frozen=True)
class ToyConfig(Config):
    """Features, and a power."""

    input_dim: int = bounded_field()
    power: float = 1.0


class ToyView(View):
    """The powers of the distances."""

    kind = "toy"
    config_type = ToyConfig
    mean: Tensor

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each buffer by name."""
        return {"mean": (self.config.input_dim,)}

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The width of the rows."""
        return (self.config.input_dim,)

    def forward(self, z: Tensor) -> Tensor:
        """Map (n, dim) to (n, dim)."""
        return (z - self.mean).abs() ** self.config.power

    def add_to_graph(self, graph: OnnxGraph, rows: str) -> list[str]:
        """Add the powers."""
        distance = graph.add("Abs", graph.add("Sub", rows, self.mean))
        return [graph.add("Pow", distance, np.float32(self.config.power))]
'''
#: One line more beside the list of families: an import and an entry.
ENTRY = "from protonet.views.toy import ToyFamily, ToyView; "
ENTRY += "VIEW_FAMILIES = (VIEW_FAMILIES[0], (ToyFamily, ToyView), *VIEW_FAMILIES[1:])"
#: Its use: solve, inspect the selection, cross-fit, save, load, update, export.
USE = """
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import torch

import protonet
from protonet.files import Model, export_onnx, load_model, save_model
from protonet.fit.cross_validation import cross_validate, cross_validation_tensors, predict_held_out
from protonet.fit.cross_validation import restore_cross_validation
from protonet.fit.search import ModelSearch
from protonet.fit.solver import fit_solution

torch.set_num_threads(1)
folder = Path.cwd()
assert Path(protonet.__file__).is_relative_to(folder), protonet.__file__
generator = torch.Generator().manual_seed(0)
y = torch.arange(400) % 2
sizes = torch.tensor([[1.0, 3.0] * 6, [3.0, 1.0] * 6])[y]  # the signs of the features hide the sizes
x = sizes * (2 * torch.randint(2, (400, 12), generator=generator) - 1) + torch.randn(400, 12, generator=generator)
stages = []
search = replace(ModelSearch(), families=ModelSearch().families[:3])  # linear, toy and kernel ridge views
solution = fit_solution([(x[:200], y[:200])], search=search, progress=lambda stage, share: stages.append(stage))
assert "toy views" in stages, stages
views = solution.view_influences
toys = {name: weight for name, weight in views.items() if name.startswith("toy to the power of ")}
assert sum(toys.values()) > 0.3, views
network = solution.network
assert "ToyView" in {type(view).__name__ for view in network.encoder.iterate_views()}
without = replace(search, families=tuple(family for family in search.families if "Toy" not in type(family).__name__))
assert not any(name.startswith("toy") for name in fit_solution([(x[:60], y[:60])], search=without).view_influences)

with torch.no_grad():
    logits = network(x)
accuracy = (logits[200:].argmax(dim=1) == y[200:]).double().mean()
assert accuracy > 0.9, accuracy
cv = cross_validate(solution)
tensors = cross_validation_tensors(cv)
model = Model(network=network, classes=("even", "odd"), update_state=tensors, folds=cv.fold_models)
save_model("toy.safetensors", model)
model = load_model("toy.safetensors", for_update=True)
with torch.no_grad():
    assert torch.equal(model.network(x), logits)
cv = restore_cross_validation(model.network, model.folds, model.update_state)
assert predict_held_out(cv).shape == (200, 2)

export_onnx("toy.onnx", model)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession("toy.onnx", options, providers=["CPUExecutionProvider"])
exported, _ = session.run(None, {"features": x.numpy()})
np.testing.assert_allclose(exported, logits.numpy(), atol=1e-4)
print("fitted, saved, loaded and exported")
"""


def test_a_new_view_takes_one_file_and_one_line(tmp_path: Path) -> None:
    package, copy = Path(protonet.__file__).parent, tmp_path / "protonet"
    shutil.copytree(package, copy)
    (copy / "views" / "toy.py").write_text(TOY, encoding="utf-8")
    with (copy / "views" / "__init__.py").open("a", encoding="utf-8") as families:
        families.write(f"{ENTRY}\n")
    changed = [
        path
        for path in copy.rglob("*.py")
        if not (other := package / path.relative_to(copy)).exists() or path.read_bytes() != other.read_bytes()
    ]
    assert sorted(path.name for path in changed) == ["__init__.py", "toy.py"]
    command = [sys.executable, "-W", "error", "-c", USE]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "fitted, saved, loaded and exported\n"
