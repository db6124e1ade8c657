"""Commands on folders of pictures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from protonet.embeddings.pictures.files import load_backbone_spec
from protonet.embeddings.pictures.reading import read_pixels
from protonet.episodes.networks.backbones import make_backbone
from protonet.files import load_model
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.picture import Picture
from tests.commands.cases import Run, do, read_table
from tests.commands.servers import start
from tests.embeddings.cases import draw, write_folders
from tests.embeddings.pictures.test_files import Small, export

pytestmark = pytest.mark.usefixtures("embedding_cache")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with training pictures, test pictures and a model."""
    root = tmp_path_factory.mktemp("pictures")
    write_folders(root / "train", per_class=6)
    write_folders(root / "test", per_class=4, first=20)
    do("fit", root / "train", "-o", root / "m.safetensors")
    return root


def test_a_folder_is_fitted_and_others_are_predicted_and_evaluated(fitted: Path, tmp_path: Path, run: Run) -> None:
    model = fitted / "m.safetensors"
    rows = run.read_rows("predict", model, fitted / "test")
    assert [Path(row["picture"]).parent.name for row in rows] == ["cross"] * 4 + ["disc"] * 4
    right = [row["class"] == Path(row["picture"]).parent.name for row in rows]
    assert sum(right) >= 7
    single = run.read_rows("predict", model, fitted / "test/disc/20.jpg")
    assert single[0]["class"] == rows[4]["class"]
    assert len(single) == 1
    metrics = tmp_path / "figures.json"
    run("evaluate", model, fitted / "test", "--json", metrics)
    assert json.loads(metrics.read_text())["accuracy"] == pytest.approx(sum(right) / 8)
    result = run("info", model)
    assert "picture: pictures, 1,458 features of 64 x 64 pixels" in result


def test_a_table_of_paths_is_the_same_as_the_folder(fitted: Path, tmp_path: Path, run: Run) -> None:
    suggested = tmp_path / "ask.csv"
    flat = tmp_path / "flat"
    flat.mkdir()
    for index in range(5):
        draw("disc", 30 + index).save(flat / f"{index}.png")
    chosen = run("suggest", fitted / "m.safetensors", flat, "-n", 2, "-o", suggested)
    assert chosen.count("\n") == 4
    lines = suggested.read_text().splitlines()
    assert lines[0] == "picture,label"
    assert all(line.endswith(",") for line in lines[1:])
    suggested.write_text("\n".join([lines[0], *(f"{line}disc" for line in lines[1:])]) + "\n")
    updated = run("update", fitted / "m.safetensors", suggested, "-o", tmp_path / "new.safetensors")
    assert "2 samples added, 0 new class" in updated
    by_path = run.read_rows("predict", fitted / "m.safetensors", suggested)
    by_folder = {row["picture"]: row for row in run.read_rows("predict", fitted / "m.safetensors", flat)}
    for line, row in zip(lines[1:], by_path, strict=True):
        assert row["class"] == by_folder[line.rstrip(",")]["class"]
    alone = run("suggest", flat, "-n", 2)  # without a model, too
    assert alone.count("\n") == 4
    for output in (chosen, alone):
        assert sum(str(path) in output for path in flat.iterdir()) == 2
    explained = run("explain", fitted / "m.safetensors", fitted / "test")
    assert "| picture |" in explained


def test_a_column_of_a_table_may_hold_pictures(fitted: Path, tmp_path: Path, run: Run) -> None:
    paths = sorted((fitted / "train").rglob("*.*"))
    table = tmp_path / "table.csv"
    lines = [f"{path},{index % 3}.5,{path.parent.name}" for index, path in enumerate(paths)]
    table.write_text("\n".join(["photo,size,kind", *lines]) + "\n")
    model = tmp_path / "m.safetensors"
    run("fit", table, "--label", "kind", "--column-type", "photo=picture", "-o", model)
    assert load_model(model).columns == ("photo", "size")
    rows = run.read_rows("predict", model, table)
    assert [row["class"] for row in rows] == [path.parent.name for path in paths]


def test_a_broken_picture_is_named_or_skipped(fitted: Path, tmp_path: Path, run: Run) -> None:
    write_folders(tmp_path / "some", per_class=4)
    broken = tmp_path / "some/cross/1.png"
    broken.write_bytes(broken.read_bytes()[:100])
    model = tmp_path / "m.safetensors"
    error = run("fit", tmp_path / "some", "-o", model, code=2)
    assert str(broken) in error
    assert "--skip-broken" in error
    assert not model.exists()
    result = run("fit", tmp_path / "some", "-o", model, "--skip-broken")
    assert f"1 of 8 pictures cannot be read: {broken}" in result
    assert "7 samples" in result
    output = tmp_path / "out.csv"
    run("predict", model, tmp_path / "some", "-o", output, code=2)
    assert not output.exists()
    rows = run.read_rows("predict", model, tmp_path / "some", "--skip-broken")
    assert len(rows) == 7
    assert str(broken) not in {row["picture"] for row in rows}


@pytest.mark.skipif(sys.platform in {"darwin", "win32"}, reason="file names are Unicode there")
def test_every_command_accepts_names_that_are_not_utf8(tmp_path: Path, run: Run) -> None:
    root = write_folders(tmp_path / os.fsdecode(b"bilder \xfc"), per_class=6)
    (root / "cross").rename(root / os.fsdecode(b"kr\xe4he"))
    (root / "disc" / "3.jpg").rename(root / "disc" / os.fsdecode(b"caf\xe9\x1b.jpg"))
    model, predicted, suggested = (tmp_path / name for name in ("m.safetensors", "p.csv", "ask.csv"))
    output = run("fit", root, "-o", model)
    assert "7 paths not in UTF-8" in output
    assert [item["name"] for item in json.loads(run("info", model, "--json"))["classes"]] == ["disc", "kr\\xe4he"]
    run("predict", model, root, "-o", predicted)
    rows = read_table(predicted.read_text(encoding="utf-8"))
    assert len(rows) == 12
    assert sum(row["picture"].endswith(f"bilder \\xfc{os.sep}disc{os.sep}caf\\xe9\\x1b.jpg") for row in rows) == 1
    again = run.read_rows("predict", model, predicted)  # the column picture of a table finds the same files
    assert [row["class"] for row in again] == [row["class"] for row in rows]
    metrics, _ = run.read_json("evaluate", model, root, "--report", tmp_path / "r.html")
    assert metrics["accuracy"] == 1
    run("suggest", model, root / "disc", "-n", 6, "-o", suggested)
    lines = suggested.read_text(encoding="utf-8").splitlines()
    suggested.write_text("\n".join([lines[0], *(f"{line}disc" for line in lines[1:])]) + "\n", encoding="utf-8")
    assert "6 samples added" in run("update", model, suggested, "-o", tmp_path / "new.safetensors")
    run("explain", model, root, "--rows", "0,1")


@pytest.mark.skipif(sys.platform in {"darwin", "win32"}, reason="file names are Unicode there")
def test_the_page_shows_pictures_whose_names_are_not_utf8(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="it listens")
    root = tmp_path / os.fsdecode(b"bilder \xfc")
    root.mkdir()
    for index in range(6):
        draw("disc", index).save(root / os.fsdecode(b"caf\xe9 %d.png" % index))
    with start("page", root, "--representation", "none", "-o", tmp_path / "own.csv") as server:
        (cell,) = server.ask_json("POST", "/api/next", {"tab": "one"})["cells"]
        assert cell.isprintable()
        assert all(server.ask("GET", f"/picture?row={row}")[1].startswith(b"\x89PNG") for row in range(6))
        assert server.ask("GET", "/")[0] == 200
        assert server.end()[0] == 0


def test_a_split_is_read_on_request(fitted: Path, tmp_path: Path, run: Run) -> None:
    model = tmp_path / "m.safetensors"
    assert "Pass --split train" in run("fit", fitted, "-o", model, code=2)
    assert not model.exists()
    run("fit", fitted, "--split", "training", "-o", model)
    assert run("predict", model, fitted / "test") == run("predict", fitted / "m.safetensors", fitted / "test")
    assert run("predict", model, fitted, "--split", "test") == run("predict", model, fitted / "test")
    assert "8 rows" in run("evaluate", model, fitted, "--split", "test")
    assert "train" in run("evaluate", model, fitted, "--split", "valid", code=2)
    assert "`--split` must come with a folder" in run("predict", model, fitted / "m.csv", "--split", "test", code=2)


def test_pictures_are_checked_before_the_fit(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folders(tmp_path / "some", per_class=5)
    (root / "disc" / "copy.png").write_bytes((root / "cross" / "2.png").read_bytes())
    (root / "disc" / "a.heic").write_bytes(b"another format")
    (root / "none").mkdir()
    model = tmp_path / "m.safetensors"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow warns
    output = run("fit", root, "-o", model)
    assert "warning: 1 picture in more than one class" in output
    assert "1 class folder without a file: none" in output
    assert "1 .heic (disc/a.heic)" in output
    run("predict", model, root, quiet=False)
    assert "1 .heic (disc/a.heic)" in run.notes
    assert "Warning" not in run.notes
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)
    error = run("fit", root, "-o", model, code=2)
    assert "(more than 1,400 pixels) and 10 more" in error


def test_what_does_not_fit_is_one_line(fitted: Path, tmp_path: Path, run: Run) -> None:
    model, table = fitted / "m.safetensors", tmp_path / "t.csv"
    table.write_text("a,b,label\n" + "".join(f"{n},{n % 3},{'xy'[n % 2]}\n" for n in range(12)))
    np.save(tmp_path / "x.npy", np.zeros((3, 4)))
    of_table = tmp_path / "table.safetensors"
    run("fit", table, "-o", of_table)
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "a.parquet").touch()
    one = tmp_path / "one" / "only"
    one.mkdir(parents=True)
    draw("disc", 0).save(one / "0.png")
    cases = {
        ("fit", fitted / "train/disc"): "must hold one folder for each class",
        ("fit", tmp_path / "one"): "must have at least 2 classes",
        ("fit", tmp_path / "nowhere"): "must be a table or a folder that exists",
        ("predict", model, table): "The model was fitted to pictures: pass a folder of them",
        ("predict", model, tmp_path / "x.npy"): "must have pictures, as in fit",
        ("predict", of_table, fitted / "test"): "must be a table, as in fit",
        ("predict", model, tables, "-o", tmp_path / "out"): "must have pictures, as in fit",
        ("predict", of_table, table, "--representation", "x.onnx"): "whose pictures a pretrained encoder read in fit",
        ("predict", model, fitted / "test", "--representation", "x.onnx"): "`--representation` must come with a model",
        ("fit", fitted / "train", "--representation", "x.onnx"): "must be a file that ends in .onnx or .pt2",
        ("fit", fitted / "train", "--representation", "x.onnx:hue=1"): "`--representation` must say no more than size",
        ("fit", fitted / "train", "--representation", "none", "x.onnx"): "`--representation` must be none, or others",
        ("fit", table, "--representation", "x.onnx"): "`--representation` must come with a column of pictures",
    }
    for arguments, message in cases.items():
        assert message in run(*arguments, code=2), arguments


def test_a_network_of_a_file_adds_to_our_picture_features(fitted: Path, tmp_path: Path, run: Run) -> None:
    network = make_backbone("conv", 784, torch.Generator().manual_seed(0)).eval()
    exported = export(network, tmp_path / "conv.pt2", 2, 784)
    model, test = tmp_path / "p.safetensors", fitted / "test"
    run("fit", fitted / "train", "--representation", exported, "-o", model)
    predicted = run("predict", model, test, "--representation", exported)
    right = [of_table["class"] == Path(of_table["picture"]).parent.name for of_table in read_table(predicted)]
    assert sum(right) >= 7
    encoding = load_model(model).encoding
    assert encoding is not None
    (column,) = encoding.columns
    assert isinstance(column, Picture)
    assert column.embedding is not None
    paths = sorted(test.rglob("*.*"))
    pixels = np.stack([read_pixels(path, 28, 28, grey=True).reshape(-1) for path in paths])
    with torch.no_grad():
        rows = network(torch.from_numpy(pixels.astype(np.float32) / 255)).numpy()
    opened = load_backbone_spec(f"{exported}:{column.embedding.record.name.partition(':')[2]}").to_pretrained_encoder()
    cells = np.array(list(map(str, paths)), object)
    x = column.with_loaded_encoder(lambda _: opened, show_progress=False).encode(cells)
    expected = (rows - column.embedding.mean) / column.embedding.scale
    np.testing.assert_allclose(x[:, : column.embedding_width], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(x[:, column.embedding_width :], Picture().encode(cells))
    other = export(Small(), tmp_path / "other.pt2", 2, 3, 8, 8)
    error = run("predict", model, test, "--representation", f"{other}:size=8", code=2)
    assert "`--representation` must be that of fit, conv.pt2" in error
    assert "other.pt2" in error
    assert "where it is now" in run("predict", model, test, code=2)


def test_a_picture_column_of_an_untrusted_file_is_checked(fitted: Path) -> None:
    encoding = load_model(fitted / "m.safetensors").encoding
    assert encoding is not None
    described, tensors = encoding.describe_columns()
    assert Encoding.restore(json.loads(json.dumps(described)), tensors) == encoding == Encoding((Picture(),))
    spoiled = {"sizes": [3], "side": 8, "version": 0, "kind": 1, "representation": {"name": 3}}
    for name, value in spoiled.items():
        with pytest.raises(ValueError, match=r"\w"):
            Encoding.restore([described[0] | {name: value}], tensors)
