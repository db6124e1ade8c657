"""Damaged tables: one line and exit code 2, or a prediction for every row; never a traceback or half a file.

``PROTONET_FUZZ=10000`` tries that many damages of each format.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protonet import solve
from protonet._checks import InputError
from protonet.files import Model, save_model
from protonet.tables.table import Wanted, read_table
from tests.commands.cases import Run, predict_or_refuse
from tests.strategies import blobs, write_columns

EXAMPLES = int(os.environ.get("PROTONET_FUZZ", "40"))
BYTES = st.binary(max_size=6) | st.sampled_from([b"\0", b"\n", b'"', b",", b"\r", b"nan", b"1e999", b"\xff\xfe", b"_"])
#: Where, how many bytes are taken away, and what is put there.
DAMAGES = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12) | st.just(10**6), BYTES), min_size=1, max_size=4)
Damages = Sequence[tuple[float, int, bytes]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and, as ``whole.*``, tables that it can read."""
    folder = tmp_path_factory.mktemp("fuzz")
    x, y = blobs(0, classes=3, dim=3)
    classes, columns = ("p", "q", "r"), ("a", "b", "c")
    network = solve([(x, y)], effort="fast")
    save_model(folder / "model.safetensors", Model(network, classes, columns, {"label": "kind"}, {}))
    names = [classes[number] for number in y.tolist()]
    write_columns(folder / "whole.csv", {**dict(zip(columns, x.T.tolist(), strict=True)), "kind": names})
    np.savez(folder / "whole.npz", x=x.numpy(), y=np.array(names))
    np.save(folder / "whole.npy", x.numpy())
    return folder


@pytest.mark.parametrize("cell", ["red", "1_000", "", "2020-01-02"])
def test_a_model_without_an_encoding_has_no_use_for_text(folder: Path, cell: str, run: Run) -> None:
    path = folder / "text.csv"
    path.write_text(f"a,b,c\n1,2,3\n1,{cell},3\n")
    message = f"`table` must have finite numbers; got {cell!r} in b, line 3. Fill it in, or leave it out."
    assert run("predict", folder / "model.safetensors", path, code=2) == f"protonet predict: {message}\n"


def damage(content: bytes, damages: Damages) -> bytes:
    for where, gone, put in damages:
        at = round(where * len(content))
        content = content[:at] + put + content[at + gone :]
    return content


@pytest.mark.parametrize("suffix", [".csv", ".npz", ".npy"])
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages=DAMAGES)
def test_damaged_tables(folder: Path, suffix: str, damages: Damages, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = folder / f"damaged{suffix}", folder / "predicted.csv"
    path.write_bytes(damage((folder / f"whole{suffix}").read_bytes(), damages))
    if not predict_or_refuse(folder / "model.safetensors", path, output, capsys):
        assert len(output.read_text().splitlines()) > 1
    if suffix != ".npy":
        with contextlib.suppress(InputError):
            read_table(path, Wanted("kind"))
