"""The command ``python -m protonet.episodes extract``: features of pictures by files, rows by our own encoders."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protonet.datasets import load_mini_imagenet, map_npz
from protonet.datasets.pictures import open_picture
from protonet.episodes.__main__ import main
from protonet.episodes.features.embeddings import Job, write_embeddings
from protonet.episodes.features.extract import find_words
from protonet.episodes.features.sources import load_source
from protonet.episodes.networks.checkpoints import load_encoder
from protonet.representations.pictures.files import embed_pictures
from tests.datasets.trees import CLASSES, make_cache, make_csv, make_folders, paint
from tests.episodes.meta_cases import save_data
from tests.representations.pictures.cases import write_folders
from tests.representations.pictures.test_files import Small, export, write_onnx

NAMES = [label for labels in CLASSES.values() for label in labels]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROTONET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def extract(*arguments: object) -> int:
    return main(["extract", *map(str, arguments)])


def test_pictures_in_folders_as_the_other_commands_embed_them(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    root = write_folders(tmp_path / "pictures", each=5)
    net = write_onnx(tmp_path / "net.onnx", ["n", 3, 8, 8], mean="0.5, 0.4, 0.3", std="0.2")
    assert extract(root, "--backbone", net, "-o", tmp_path / "a.npz", "--batch", 3) == 0
    paths = sorted(root.rglob("*.*"))
    with np.load(tmp_path / "a.npz") as file:
        np.testing.assert_allclose(file["x"], embed_pictures(paths, net), rtol=1e-6, atol=1e-6)
        assert [root / name for name in file["files"]] == paths
        assert file["y"].tolist() == [path.parent.name for path in paths]
        assert "split" not in file.files
        made = json.loads(str(file["made"]))
    assert (made["data"], made["preprocessing"]["height"], len(made["weights"])) == (str(root), 8, 64)
    assert load_source(str(tmp_path / "a.npz")).class_names == ("cross", "disc")


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_network_of_a_fixed_number_of_pictures(tmp_path: Path, batch: int) -> None:
    root = write_folders(tmp_path / "pictures", each=3)
    net = export(Small(), tmp_path / "net.pt2", batch, 3, 8, 8, fixed=True)
    several = export(Small(), tmp_path / "several.pt2", 2, 3, 8, 8)
    for name, backbone in (("a", net), ("b", several)):
        typed = f"{backbone}:mean=0.5,std=0.1/0.2/0.3"
        assert extract(root, "--backbone", typed, "-o", tmp_path / f"{name}.npz", "--batch", 5) == 0
    with np.load(tmp_path / "a.npz") as found, np.load(tmp_path / "b.npz") as expected:
        np.testing.assert_allclose(found["x"], expected["x"], rtol=1e-6)
    paths = sorted(root.rglob("*.*"))  # fewer than a batch of 4 at the end
    settings: dict[str, Any] = {"mean": [0.5], "std": [0.1, 0.2, 0.3]}
    np.testing.assert_allclose(embed_pictures(paths, net, **settings), expected_rows(tmp_path), rtol=1e-5, atol=1e-5)


def expected_rows(folder: Path) -> np.ndarray:
    with np.load(folder / "b.npz") as file:
        rows: np.ndarray = file["x"]
    return rows


@pytest.mark.parametrize("form", ["lists", "pickles", "folders"])
def test_a_data_set_with_its_split(tmp_path: Path, form: str) -> None:
    root = tmp_path / "data"
    root.mkdir()
    {"lists": make_csv, "pickles": make_cache, "folders": make_folders}[form](root)
    net = export(Small(), tmp_path / "net.pt2", 2, 3, 84, 84)
    text = str(root) if form == "folders" else f"mini-imagenet:{root}"
    assert extract(text, "--backbone", net, "-o", tmp_path / "a.npz") == 0
    found, data = map_npz(tmp_path / "a.npz"), load_mini_imagenet(root)
    assert (found.class_names, found.sides) == (data.class_names, data.sides)
    # From 20 to 84 pixels a picture of one colour keeps it.
    expected = torch.from_numpy(np.stack([paint(name, k) for name in NAMES for k in (0, 1)])[:, 0, 0]).float() / 255
    embedded = Small()(expected[:, :, None, None].expand(-1, -1, 84, 84))
    torch.testing.assert_close(found.x.clone(), embedded.detach(), rtol=0, atol=0.15)
    with np.load(tmp_path / "a.npz") as file:
        assert ("files" in file.files) == (form != "pickles")
    arguments = ["--way", "2", "--query", "1", "--episodes", "5", "--method", "protonet", "simpleshot"]
    assert main(["--dataset", str(tmp_path / "a.npz"), *arguments]) == 0


def test_rows_by_an_encoder_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(save_data(tmp_path / "tiny.npz"))
    small = ["--backbone", "mlp", "--way", "4", "--query", "2", "--steps", "2", "--eval-every", "2", "--device", "cpu"]
    encoder = str(tmp_path / "mlp.safetensors")
    assert main(["train", "--dataset", data, "-o", encoder, *small]) == 0
    assert extract(data, "--backbone", encoder, "-o", tmp_path / "a.npz") == 0
    assert "a.npz: 72 rows of 128 features, 9 classes" in capsys.readouterr().out
    found, raw = map_npz(tmp_path / "a.npz"), load_source(data)
    assert torch.equal(found.x, load_encoder(encoder)(raw.x.float()))
    assert (found.class_names, found.sides, found.y.tolist()) == (raw.class_names, raw.sides, raw.y.tolist())
    scores = []
    for arguments in (["--dataset", data, "--encoder", encoder], ["--dataset", str(tmp_path / "a.npz")]):
        path = tmp_path / "scores.json"
        more = ["--way", "2", "--query", "3", "--episodes", "20", "--method", "protonet", "--json", str(path)]
        assert main([*arguments, *more]) == 0
        scores.append(json.loads(path.read_text(encoding="utf-8"))["right"])
    assert scores[0] == scores[1]


def test_ctrl_c_and_then_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folders(tmp_path / "pictures", each=10)
    net = export(Small(), tmp_path / "net.pt2", 2, 3, 8, 8)
    assert extract(root, "--backbone", net, "-o", tmp_path / "whole.npz", "--batch", 4) == 0
    opened: list[object] = []

    def interrupt(*given: Any) -> Any:
        opened.append(given)
        if len(opened) == 15:
            raise KeyboardInterrupt
        return open_picture(*given)

    monkeypatch.setattr("protonet.episodes.features.extract.open_picture", interrupt)
    out = tmp_path / "a.npz"
    arguments = (root, "--backbone", net, "-o", out, "--batch", 4)
    assert extract(*arguments) == 130
    error = capsys.readouterr().err
    assert re.search(r"protonet\.episodes extract: stopped after (4|8|12) of 20 rows; run again with --resume\n", error)
    assert not out.exists()
    assert extract(*arguments, "--resume") == 0
    assert len(opened) < 15 + 20  # those that were done are not read again
    with np.load(out) as found, np.load(tmp_path / "whole.npz") as expected:
        assert all(found[name].tobytes() == expected[name].tobytes() for name in expected.files)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{root}", "--backbone", "net.onnx", "-o", "a.txt"], r"`--output` must end in \.npz; got a\.txt"),
        (
            ["{root}", "--backbone", "none.onnx", "-o", "{out}"],
            r"`--backbone` must be a file that ends in \.onnx, \.pt2 or \.safetensors \(of train\), or one of",
        ),
        (["{root}", "--backbone", "{net}:size=x", "-o", "{out}"], "`--backbone` must say no more than size, mean, std"),
        (["{root}", "--backbone", "{net}:hue=1", "-o", "{out}"], "`--backbone` must say no more than size, mean, std"),
        (["{root}", "--backbone", "{net}:std=1/2", "-o", "{out}"], "`--backbone` must be 3 finite numbers, or one"),
        (["{root}", "--backbone", "{net}", "-o", "{out}", "--batch", "0"], "`--batch` must be a whole number >= 1"),
        (
            ["{root}", "--backbone", "{net}", "-o", "{out}", "--device", "abacus"],
            "`--device` must be one that torch has",
        ),
        (["digits", "--backbone", "{net}", "-o", "{out}"], r"`data` must be a folder of pictures by class, .*digits"),
        (["cub:{root}", "--backbone", "{net}", "-o", "{out}"], "^protonet.episodes extract: `root` must hold images"),
        (
            ["{root}", "--backbone", "{net}", "-o", "{out}", "--weights", "w.pt"],
            "`--weights` must come with the name of",
        ),
        (["{root}", "--backbone", "{net}", "-o", "{out}", "--names", "x"], "`--names` must come with --texts"),
        (["{root}", "--backbone", "{net}", "-o", "{out}", "--template", "{{}}"], "`--template` must come with --texts"),
        (
            ["{root}", "--backbone", "{net}", "-o", "{out}", "--texts", "--template", "a"],
            r"`--template` must have one \{\}",
        ),
        (
            ["{root}", "--backbone", "{net}", "-o", "{out}", "--texts"],
            r"`--texts` must come with --backbone open_clip:",
        ),
        (
            ["{root}", "--backbone", "a.safetensors", "-o", "{out}", "--texts"],
            "`--backbone` must be another than a checkpoint of ours, to take this; got --texts with",
        ),
        (["{root}", "--backbone", "a.safetensors", "-o", "{out}"], "must be a checkpoint of protonet.episodes train"),
        (
            ["{root}", "--backbone", "{net}", "-o", "{out}", "--image-size", "9"],
            "`--image-size` must come with a checkpoint",
        ),
        (["{root}", "--backbone", "{net}"], "arguments"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folders(tmp_path / "pictures", each=1)
    net = export(Small(), tmp_path / "net.pt2", 2, 3, 8, 8)
    given = [each.format(root=root, net=net, out=tmp_path / "out.npz") for each in arguments]
    assert extract(*given) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not list(tmp_path.glob("out.npz*"))


def test_a_picture_that_cannot_be_read_and_a_file_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folders(tmp_path / "pictures", each=2)
    net = export(Small(), tmp_path / "net.pt2", 2, 3, 8, 8)
    (root / "disc" / "1.jpg").write_bytes(b"nothing")
    arguments = (root, "--backbone", net, "-o", tmp_path / "a.npz", "--batch", "1")
    assert extract(*arguments) == 2
    assert "`root` must hold images that can be read; got " in capsys.readouterr().err
    write_folders(tmp_path / "more", each=2)
    (root / "disc" / "1.jpg").write_bytes((tmp_path / "more" / "disc" / "1.jpg").read_bytes())
    assert extract(*arguments, "--resume") == 2  # other pictures than those that the part is of
    assert "`--resume` must continue a run of the same arguments; got " in capsys.readouterr().err
    (tmp_path / "a.npz.part").unlink()
    assert extract(*arguments) == 0
    assert extract(*arguments, "--resume") == 0
    capsys.readouterr()
    assert extract(*arguments) == 2
    assert "`--output` must be a new file; got " in capsys.readouterr().err
    shutil.rmtree(root / "disc")
    assert extract(root, "--backbone", net, "-o", tmp_path / "b.npz") == 2
    assert "`data` must have at least 2 classes; got 1" in capsys.readouterr().err


def test_memory_is_that_of_a_few_batches(tmp_path: Path) -> None:
    asked: list[int] = []

    def embed(first: int) -> Iterator[np.ndarray]:
        for start in range(first, 4000, 100):
            asked.append(start)
            assert (tmp_path / "a.npz.part").stat().st_size >= 4 * 8 * start
            yield np.zeros((100, 8), np.float32)

    job = Job(["a"] * 4000, None, None, embed, 100, {}, "")
    write_embeddings(tmp_path / "a.npz", job, resume=False)
    assert len(asked) == 40


def test_what_classes_are_called(tmp_path: Path) -> None:
    assert find_words(["001.Black_footed_Albatross", "grey wolf", "maple_tree"], None) == [
        "Black footed Albatross",
        "grey wolf",
        "maple tree",
    ]
    for name in ("n01532829", "12"):
        with pytest.raises(ValueError, match=rf"`--names` must say what classes are called .*; got 1 such as {name}\."):
            find_words(["ant", name], None)
    path = tmp_path / "names.txt"
    path.write_text("n01 house finch, linnet\nn02\trobin, American robin\nn03,jay\nblack bear,bear\nn01532829 x\n")
    assert find_words(["n01", "n02", "n03", "black bear"], str(path)) == ["house finch", "robin", "jay", "bear"]
    with pytest.raises(
        ValueError, match=r"`--names` must have a line of each class; got none for 1 of 2, such as 'n9'"
    ):
        find_words(["n01", "n9"], str(path))
    with pytest.raises(ValueError, match=r"`--names` must be a file of text that can be read; got .*no \(FileNotFound"):
        find_words(["n01"], str(tmp_path / "no"))
