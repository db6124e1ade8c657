"""What `.ci/wheel` runs in an environment that holds the wheel and what it depends on, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

import protonet

EXTRAS = ("safetensors", "sklearn", "pandas", "matplotlib", "onnx", "pytest", "sphinx")


def fit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m protonet fit`` on the table that `main` wrote."""
    command = [sys.executable, "-m", "protonet", "fit", "table.csv", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> None:
    """Solve a small problem; fit a table without a file for the model, and ask for one that needs an extra."""
    place = Path(protonet.__file__).resolve()
    assert Path(sys.prefix).resolve() in place.parents, f"{place} is not of this environment"
    assert not [name for name in EXTRAS if find_spec(name)], "the environment is not bare"
    assert (place.parent / "py.typed").is_file(), "the wheel lacks py.typed"

    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 16, generator=generator)
    labels = torch.arange(240) % 4
    features = centres[labels] + 0.5 * torch.randn(240, 16, generator=generator)
    network = protonet.solve([(features[:40], labels[:40])])
    accuracy = float((network(features[40:]).argmax(dim=1) == labels[40:]).float().mean())
    assert accuracy >= 0.95, accuracy

    lines = [
        "a,b,c,label",
        *(f"{row[0]},{row[1]},{row[2]},{y}" for row, y in zip(features.tolist(), labels.tolist(), strict=True)),
    ]
    Path("table.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    summary = fit()
    assert summary.returncode == 0, summary.stderr
    refused = fit("-o", "model.protonet")
    assert refused.returncode == 2, refused
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    assert 'pip install "protonet-solver[files]"' in refused.stderr, refused.stderr
    assert not Path("model.protonet").exists()

    versions = ", ".join(f"{name} {version(name)}" for name in ("protonet-solver", "torch", "numpy"))
    print(f"bare environment, Python {sys.version.split()[0]}, {versions}: {accuracy:.1%} of 200 fresh rows right")
    print(refused.stderr.strip())


if __name__ == "__main__":
    main()
