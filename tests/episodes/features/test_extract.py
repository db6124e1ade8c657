"""The command ``python -m protonet.episodes extract``, with networks in files and with encoders of ``train``."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from protonet.datasets import load_benchmark, load_npz
from protonet.datasets.pictures import open_picture
from protonet.embeddings.pictures.files import embed_pictures
from protonet.episodes.features.extract import get_class_words, select_convolutions
from protonet.episodes.features.sources import load_source
from protonet.episodes.networks.checkpoints import load_trained_encoder
from tests.datasets.trees import CLASSES, make_cache, make_csv, make_folders, paint
from tests.embeddings.cases import write_folders
from tests.embeddings.pictures.test_files import Small, export, write_onnx
from tests.episodes.cases import Command, save_data

NAMES = [label for labels in CLASSES.values() for label in labels]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROTONET_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def net() -> Path:
    """Write two classes of two pictures, and a network that takes two pictures of 8 x 8 pixels or more at a time."""
    write_folders(Path("pictures"), per_class=2)
    return export(Small(), Path("net.pt2"), 2, 3, 8, 8)


def read(path: str) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def test_pictures_in_folders_as_the_other_commands_embed_them(command: Command) -> None:
    pytest.importorskip("onnxruntime")
    root = write_folders(Path("pictures"), per_class=5)
    net = write_onnx(Path("net.onnx"), ["n", 3, 8, 8], mean="0.5, 0.4, 0.3", std="0.2")
    command("extract pictures --backbone net.onnx -o a.npz --batch 3")
    paths, arrays = sorted(root.rglob("*.*")), read("a.npz")
    np.testing.assert_allclose(arrays["x"], embed_pictures(paths, net), rtol=1e-6, atol=1e-6)
    assert [root / name for name in arrays["files"]] == paths
    assert arrays["y"].tolist() == [path.parent.name for path in paths]
    assert "split" not in arrays
    made = json.loads(str(arrays["made"]))
    assert (made["data"], made["preprocessing"]["height"], len(made["weights"])) == (str(root), 8, 64)
    assert load_source("a.npz").class_names == ("cross", "disc")


@pytest.mark.parametrize("form", ["lists", "pickles", "folders"])
def test_a_data_set_with_its_split(command: Command, form: str) -> None:
    root = Path("data")
    root.mkdir()
    {"lists": make_csv, "pickles": make_cache, "folders": make_folders}[form](root)
    export(Small(), Path("net.pt2"), 2, 3, 84, 84)
    command("extract", "data" if form == "folders" else "mini-imagenet:data", "--backbone net.pt2 -o a.npz")
    extracted, data = load_npz("a.npz"), load_benchmark("mini-imagenet", root)
    assert (extracted.class_names, extracted.sides) == (data.class_names, data.sides)
    # From 20 to 84 pixels a picture of one colour keeps it.
    expected = torch.from_numpy(np.stack([paint(name, k) for name in NAMES for k in (0, 1)])[:, 0, 0]).float() / 255
    embedded = Small()(expected[:, :, None, None].expand(-1, -1, 84, 84))
    torch.testing.assert_close(extracted.x.clone(), embedded.detach(), rtol=0, atol=0.15)
    assert ("files" in read("a.npz")) == (form != "pickles")
    command("--dataset a.npz --way 2 --query 1 --episodes 5 --method protonet simpleshot")


@pytest.mark.usefixtures("no_baseline")
def test_rows_by_an_encoder_of_ours(command: Command) -> None:
    save_data(Path("tiny.npz"))
    small = "--backbone mlp --way 4 --query 2 --steps 2 --eval-every 2 --device cpu"
    command("train --dataset tiny.npz -o mlp.safetensors", small)
    line = "a.npz: 72 rows of 128 features, 9 classes"
    assert line in command("extract tiny.npz --backbone mlp.safetensors -o a.npz")
    extracted, raw = load_npz("a.npz"), load_source("tiny.npz")
    assert torch.equal(extracted.x, load_trained_encoder("mlp.safetensors").encoder(raw.x.float()))
    assert (extracted.class_names, extracted.sides) == (raw.class_names, raw.sides)
    assert torch.equal(extracted.y, raw.y)
    few = "--way 2 --query 3 --episodes 20 --method protonet"
    before = command.read("--dataset tiny.npz --encoder mlp.safetensors", few)
    assert before["right"] == command.read("--dataset a.npz", few)["right"]


@pytest.mark.usefixtures("no_baseline")
def test_maps_of_an_encoder_of_ours(command: Command) -> None:
    generator = np.random.default_rng(0)
    y, sides = np.repeat(np.arange(9), 8), np.repeat(np.array(["base"] * 3 + ["validation"] * 3 + ["novel"] * 3), 8)
    pixels = generator.normal(size=(9, 16 * 16))[y] + generator.normal(size=(72, 16 * 16))
    np.savez("square.npz", x=pixels.astype(np.float32), y=y, split=sides)
    small = "train --dataset square.npz --way 3 --query 2 --steps 1 --eval-every 1 --device cpu"
    command(small, "--backbone conv -o conv.safetensors")
    command("extract square.npz --backbone conv.safetensors -o rows.npz")
    command("extract square.npz --backbone conv.safetensors -o maps.npz --maps")
    rows, maps = load_npz("rows.npz"), load_npz("maps.npz")
    assert torch.equal(rows.x, maps.x)  # this encoder has no mean over places
    assert (rows.shape, maps.shape, maps.has_feature_maps) == (None, (64, 2, 2), True)
    few = "--way 2 --query 3 --episodes 20 --method"
    assert "| frn " in command("--dataset maps.npz", few, "protonet frn")
    command.refuses("`--method` must find maps of a network; got none for frn", "--dataset rows.npz", few, "frn")
    assert select_convolutions(nn.Sequential(nn.Linear(4, 2))) is None
    pooled = nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 5, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    convolutions, x = select_convolutions(pooled), torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    assert convolutions is not None
    torch.testing.assert_close(convolutions(x).mean(dim=(2, 3)), pooled(x))


def test_ctrl_c_and_then_resume(command: Command, net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped run continues to the same bytes, even if the last bytes of its file, or of the header, are lost."""
    arguments = f"extract many --backbone {net} --batch 4 -o"
    write_folders(Path("many"), per_class=10)
    command(arguments, "whole.npz")
    for cut in (0, 1, 40, 1000):
        opened: list[object] = []

        def interrupt(*given: Any, opened: list[object] = opened) -> Any:
            opened.append(given)
            if len(opened) == 15:
                raise KeyboardInterrupt
            return open_picture(*given)

        monkeypatch.setattr("protonet.episodes.features.extract.open_picture", interrupt)
        command(arguments, f"{cut}.npz", code=130)
        line = r"protonet\.episodes extract: stopped after (4|8|12) of 20 rows; run again with --resume\n"
        assert re.search(line, command.error)
        assert not Path(f"{cut}.npz").exists()
        command.refuses(r"`--output` must be a new file; got .*\.part, which exists\. Go on", arguments, f"{cut}.npz")
        part = Path(f"{cut}.npz.part")
        part.write_bytes(part.read_bytes()[: max(0, part.stat().st_size - cut)])
        command(arguments, f"{cut}.npz --resume")
        assert cut or len(opened) < 15 + 20  # finished pictures are not read again
        result, expected = read(f"{cut}.npz"), read("whole.npz")
        assert all(result[name].tobytes() == expected[name].tobytes() for name in expected)
        assert not part.exists()


@pytest.mark.usefixtures("net")
def test_errors_of_arguments_are_one_line(command: Command) -> None:
    for arguments, message in [
        ("-o a.txt", r"`--output` must end in \.npz; got a\.txt"),
        ("--backbone none.onnx", r"`--backbone` must be a file that ends in \.onnx, \.pt2 or \.safetensors \(of train"),
        ("--backbone net.pt2:size=x", "`--backbone` must say no more than size, mean, std"),
        ("--batch 0", "`--batch` must be a whole number >= 1"),
        ("--device abacus", "`--device` must be a device of this machine"),
        ("--weights w.pt", "`--weights` must come with the name of"),
        ("--names x", "`--names` must come with `--texts`"),
        ("--template {}", "`--template` must come with `--texts`"),
        ("--texts --template a", r"`--template` must have one \{\}"),
        ("--texts", r"`--texts` must come with `--backbone` open_clip:"),
        ("--texts --maps", "`--maps` must come without `--texts`; got both"),
        ("--backbone a.safetensors --texts", "another than a checkpoint of ours, to take this; got `--texts` with"),
        ("--backbone a.safetensors", "must be a checkpoint of protonet.episodes train"),
        ("--image-size 9", "`--image-size` must come with FILE.safetensors"),
    ]:
        command.refuses(message, "extract pictures --backbone net.pt2 -o out.npz", arguments)
        assert not list(Path().glob("out.npz*"))


@pytest.mark.usefixtures("net")
def test_data_that_are_no_pictures(command: Command) -> None:
    given = "--backbone net.pt2 -o out.npz"
    command.refuses(r"`DATA` must be a folder of pictures by class, .*digits", "extract digits", given)
    command.refuses("^protonet.episodes extract: `root` must hold images", "extract cub:pictures", given)
    command.refuses("missing argument", "extract pictures --backbone net.pt2")
    shutil.rmtree("pictures/disc")
    command.refuses("`DATA` must have at least 2 classes; got 1", "extract pictures", given)


def test_a_picture_that_cannot_be_read_and_files_of_something_else(command: Command, net: Path) -> None:
    broken = Path("pictures", "disc", "1.jpg")
    full = broken.read_bytes()
    broken.write_bytes(b"nothing")
    arguments = f"extract pictures --backbone {net} -o a.npz --batch 1"
    command.refuses("`root` must hold images that can be read; got ", arguments)
    broken.write_bytes(full)  # other pictures than those that the part is of
    other = r"`--resume` must continue a run of the same arguments; got .*a\.npz"
    command.refuses(rf"{other}\.part, of other data", arguments, "--resume")
    Path("a.npz.part").unlink()
    command(arguments)
    command(arguments, "--resume")
    command.refuses("`--output` must be a new file; got ", arguments)
    command.refuses(f"{other}, of other data", arguments, "--resume --batch 2")
    np.savez("a.npz", x=np.eye(2))
    command.refuses(f"{other}, of other data", arguments, "--resume")


def test_words_of_classes() -> None:
    words = get_class_words(["001.Black_footed_Albatross", "grey wolf", "maple_tree"], None)
    assert words == ["Black footed Albatross", "grey wolf", "maple tree"]
    lines = "n01 house finch, linnet\nn02\trobin, American robin\nn03,jay\nblack bear,bear\nn01532829 x\n"
    Path("names.txt").write_text(lines, encoding="utf-8")
    words = get_class_words(["n01", "n02", "n03", "black bear"], "names.txt")
    assert words == ["house finch", "robin", "jay", "bear"]
    for names, file, expected_message in (
        (["ant", "n01532829"], None, r"say what classes are called .*; got 1 such as n01532829\."),
        (["ant", "12"], None, r"say what classes are called .*; got 1 such as 12\."),
        (["n01", "n9"], "names.txt", r"have a line of each class; got none for 1 of 2, such as 'n9'"),
        (["n01"], "no", r"be a file of text that can be read; got no \(FileNotFound"),
    ):
        with pytest.raises(ValueError, match=rf"`names` must {expected_message}"):
            get_class_words(names, file)


PLUGIN = """
import torch

def embed(pictures):
    assert pictures.shape[1] == 3 and 0 <= pictures.min() and pictures.max() <= 1
    return torch.nn.functional.adaptive_avg_pool2d(pictures, 2).flatten(1)

network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())

def flat(pictures):
    return pictures

def broken(pictures):
    return 1 / 0

def infinite(pictures):
    return torch.full((len(pictures), 2), torch.inf)

number = 3
"""


def test_a_function_of_a_file_is_a_backbone(command: Command) -> None:
    Path("mine.py").write_text(PLUGIN, encoding="utf-8")
    write_folders(Path("pictures"), per_class=3)
    made = {}
    for name, size in (("embed", 8), ("embed", 6), ("network", 8)):
        output = f"{name}-{size}.npz"
        command(f"extract pictures --backbone mine.py:{name} --image-size {size} --batch 2 -o {output}")
        made[name, size] = read(output)
    result = made["embed", 8]
    assert result["x"].shape == (6, 12)
    assert json.loads(str(result["made"]))["preprocessing"] == {"size": 8}
    np.testing.assert_array_equal(made["network", 8]["x"], result["x"])
    assert not np.allclose(made["embed", 6]["x"], result["x"])
    with Image.open(Path("pictures") / str(result["files"][0])) as image:
        pixels = np.asarray(image.convert("RGB").resize((8, 8)), np.float32) / 255
    expected = pixels.reshape(2, 4, 2, 4, 3).mean(axis=(1, 3)).transpose(2, 0, 1).ravel()
    np.testing.assert_allclose(result["x"][0], expected, rtol=1e-5)


def test_errors_of_functions_as_backbones(command: Command) -> None:
    Path("mine.py").write_text(PLUGIN, encoding="utf-8")
    write_folders(Path("pictures"), per_class=3)
    for more, message in [
        ("mine.py:flat", r"must return a tensor of shape \(n, dim\), with n = \d here; got"),
        ("mine.py:broken", r"must run on every batch .*ZeroDivisionError .*mine\.py, line \d+"),
        ("mine.py:infinite", r"must give finite numbers; got others for row 0\. Pass"),
        ("mine.py:number", "must be a function from pictures to embeddings; got int"),
        ("mine.py:absent", "must be a function of its file; .* It has embed, flat, broken"),
        ("absent.py:embed", "must be in a file that exists"),
    ]:
        command.refuses(f"`--backbone` {message}", "extract pictures -o a.npz --backbone", more)
    command.refuses("`--maps` must come with efficientnet", "extract pictures -o a.npz --backbone mine.py:embed --maps")
    command("extract pictures -o a.npz --backbone mine.py:embed")  # no failure above is in the way
