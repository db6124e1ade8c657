"""The command ``python -m protonet.episodes extract``: embed pictures or class names, and write them as NPZ file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from protonet._io import progress_bar, write_atomically
from protonet._validation import check_device
from protonet.datasets.benchmarks import describe_class_list_difference
from protonet.datasets.dataset import Dataset
from protonet.datasets.files import write_npz
from protonet.datasets.pictures import (
    ImageSet,
    ImageSource,
    RotatedPicture,
    hash_file_stamps,
    load_pictures,
    open_picture,
)
from protonet.embeddings.encoder import hash_file
from protonet.embeddings.pictures.networks import PictureExtractor, load_extractor
from protonet.embeddings.pictures.reading import make_blank_picture, resize_picture
from protonet.episodes.features.sources import FOLDER_IMAGE_SIZE, load_source, locate_pictures
from protonet.episodes.networks.backbones import EMBED_BATCH_SIZE
from protonet.episodes.networks.checkpoints import load_trained_encoder
from protonet.episodes.options import CLIP_PROMPT_TEMPLATE, PICTURE_BATCH_SIZE, ExtractOptions
from protonet.episodes.plugins import PLUGIN_PATTERN, load_plugin, wrap_plugin_error
from protonet.episodes.samplers.batch import hash_class_rows
from protonet.errors import optional_packages, raise_input_error
from protonet.sampling import index_classes

if TYPE_CHECKING:
    from PIL.Image import Image

CHECKPOINT_SUFFIX = ".safetensors"  #: Suffix of the encoder files of ``train``.


@dataclass(frozen=True, kw_only=True)
class EmbeddingJob:
    """Pictures, texts or rows to embed, with their labels and the function that embeds them."""

    labels: Sequence[str]  #: The class name of each row.
    split_sides: Sequence[str] | None = None  #: The side of each row's class in the split; None without a split.
    inputs: Sequence[str] | None = None  #: For each row the file or the text that is embedded; None for other rows.
    embed_from: Callable[[int], Iterator[np.ndarray]]
    """Takes the index of the first row to embed, a multiple of ``batch_size``. Yields the embeddings from this row on,
    in blocks (step, dim) float32; the last block may be smaller."""
    batch_size: int  #: Rows per block. A resumed run continues at the start of a block, with the same results.
    provenance: Mapping[str, object]  #: The settings that determine the embeddings, for JSON.
    source_hash: str  #: A text, such as a hash, that changes if the data change.
    map_shape: tuple[int, int, int] | None = None
    """(channels, height, width) if embeddings are flattened feature maps; otherwise None."""

    def compute_hash(self) -> str:
        """Compute a hash of everything that determines the embeddings, to check whether a file is from the same job."""
        rows = [list(self.labels), list(self.split_sides or ())]
        identity: list[object] = [self.provenance, self.source_hash, self.batch_size, *rows]
        identity += [] if self.map_shape is None else [self.map_shape]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _write_embeddings(output: Path, job: EmbeddingJob, *, resume: bool) -> int:
    """Embed the rows of a job, and write the embeddings with their labels to an NPZ file.

    The file has ``x`` (n, dim) float32, ``y`` (n,) strings and ``made``, the settings as JSON. If the job has them, it
    also has ``split`` (sides) and ``files`` (n,) strings, and ``maps`` (3,), the shape of feature maps. Until all rows
    are embedded, finished blocks are stored in a file in the same folder whose name ends in ``.part``.

    With ``resume``, the part file of the same job is continued; a finished file stays unchanged. Returns ``dim``.
    """
    key, n = job.compute_hash(), len(job.labels)
    part = output.with_name(f"{output.name}.part")
    if output.exists():
        finished = _read_job_hash_and_dim(output)
        if not resume or finished is None or finished[0] != key:
            _raise_output_exists(output, resume=resume)
        return finished[1]
    if not resume and part.exists() and part.stat().st_size:  # a run that failed early leaves an empty file
        _raise_output_exists(part, resume=False)
    # Rows that are copied at a time from the part file to the finished file.
    rows_per_copy = 1024
    with part.open("a+b") as file:
        header = f"protonet extract {key}\n".encode()
        dim, done = _recover_part_file(file, part, header, n, job.batch_size)
        try:
            with progress_bar(total=n, initial=done, unit="row") as bar:
                for block in job.embed_from(done) if done < n else ():
                    bad = ~np.isfinite(block).all(axis=1)
                    if bad.any():
                        got = f"others for row {done + int(bad.argmax())}"
                        remedy = "Pass another one, or mend that picture."
                        raise_input_error("backbone", "give finite numbers", got, remedy)
                    if not dim:
                        dim = block.shape[1]
                        file.write(header + dim.to_bytes(4, "little"))
                    file.write(np.ascontiguousarray(block, "<f4").data)
                    file.flush()
                    done += len(block)
                    bar.update(len(block))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped after {done:,} of {n:,} rows; run again with --resume") from None
        more = {"y": job.labels, "made": json.dumps(job.provenance), "key": key, "dim": dim}
        more |= {"split": job.split_sides, "files": job.inputs, "maps": job.map_shape}
        arrays = {name: np.array(value) for name, value in more.items() if value is not None}
        file.seek(len(header) + 4)
        blocks = iter(lambda: file.read(4 * dim * rows_per_copy), b"")
        rows = (np.frombuffer(block, "<f4").reshape(-1, dim) for block in blocks)
        write_atomically(output, lambda opened: write_npz(opened, (n, dim), "float32", rows, arrays))
    part.unlink()
    return dim


def _recover_part_file(file: BinaryIO, part: Path, header: bytes, n: int, step: int) -> tuple[int, int]:
    """Remove an incomplete last batch from a job's part file; return the numbers of features and finished rows."""
    file.seek(0)
    content = file.read(len(header) + 4)
    if content[: len(header)] != header[: len(content)]:
        _raise_output_exists(part, resume=True)
    dim = int.from_bytes(content[len(header) :], "little") if len(content) == len(header) + 4 else 0
    if not dim:
        file.truncate(0)
        return 0, 0
    done = min(n, (file.seek(0, os.SEEK_END) - len(content)) // (4 * dim))
    done -= 0 if done == n else done % step
    file.truncate(len(content) + 4 * dim * done)
    return dim, done


def _read_job_hash_and_dim(path: Path) -> tuple[str, int] | None:
    """Read the job's hash and the number of features from a finished NPZ file; None if no embedding job wrote it."""
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            return str(file["key"]), int(file["dim"])
    except (OSError, ValueError, LookupError, TypeError, zipfile.BadZipFile):
        return None


def _raise_output_exists(path: Path, *, resume: bool) -> NoReturn:
    """Raise an InputError about an output file that already exists or, with ``resume``, is from another job."""
    if resume:
        got, remedy = f"{path}, of other data, settings or another network", "Pass another path, or remove it."
        raise_input_error("resume", "continue a run of the same arguments", got, remedy)
    remedy = "Go on with --resume, or pass another path."
    raise_input_error("output", "be a new file", f"{path}, which exists", remedy)


def run_extract(options: ExtractOptions) -> None:
    """Run the command ``extract``: embed pictures, rows or class names, and write the embeddings to an NPZ file."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device("device", device)
    if Path(options.backbone).suffix.lower() == CHECKPOINT_SUFFIX:
        job = _make_row_job(options, device)
    else:
        image_set = None if options.texts else locate_pictures(options.data)
        if image_set is None and not options.texts:
            got = f"{options.data}, which is none"
            raise_input_error("data", "be a folder of pictures by class, or KIND:ROOT", got, "Pass one of these.")
        extractor = _open_extractor(options, image_set, device)
        make_job = _make_class_prompt_job if image_set is None else partial(_make_picture_job, image_set)
        job = make_job(options, extractor)
    dim = _write_embeddings(options.output, job, resume=options.resume)
    notes = describe_class_list_difference(options.data, Counter(zip(job.labels, job.split_sides or (), strict=False)))
    print("".join(f"{note}\n" for note in notes), end="")
    print(f"{options.output}: {len(job.labels):,} rows of {dim} features, {len(set(job.labels))} classes")


def _open_extractor(options: ExtractOptions, image_set: ImageSet | None, device: str) -> PictureExtractor:
    """Load the network of the option ``--backbone``: a user's function, a file, or a library's network by name."""
    is_plugin = PLUGIN_PATTERN.fullmatch(options.backbone) is not None
    got = f"`backbone` {options.backbone}"
    if options.image_size is not None and not is_plugin:
        constraint = "come with FILE.safetensors or FILE.py:FUNCTION"
        raise_input_error("image_size", constraint, got, "Leave it out; other backbones have their own size.")
    if is_plugin and options.weights is not None:
        remedy = "Leave it out, and load the weights in the file."
        raise_input_error("weights", "come with the name of a network", got, remedy)
    with optional_packages("pictures"):
        import PIL.Image as _  # noqa: F401, PLC0415 - optional
    if is_plugin:
        size = options.image_size or (FOLDER_IMAGE_SIZE if image_set is None else image_set.image_side)
        return _open_plugin_network(options.backbone, size, device)
    return load_extractor(options.backbone, weights=options.weights, device=device)


def _open_plugin_network(backbone: str, size: int, device: str) -> PictureExtractor:
    """Load a function or module of a user's file that maps pictures (n, 3, side, side) to embeddings (n, dim)."""
    function, origin = load_plugin("backbone", backbone, "a function from pictures to embeddings")
    if isinstance(function, nn.Module):
        function = function.to(device).eval()

    def prepare(image: Image) -> Tensor:
        return torch.from_numpy(resize_picture(image, size, size))

    def embed(pixels: Tensor) -> Tensor:
        try:
            with torch.no_grad():
                embeddings = function(pixels.to(device).float() / 255)
        except Exception as error:
            constraint = "run on every batch of pictures"
            raise wrap_plugin_error(error, "backbone", constraint, backbone) from error
        shape = tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        if not isinstance(embeddings, Tensor) or embeddings.ndim != 2 or len(embeddings) != len(pixels):
            constraint = f"return a tensor of shape (n, dim), with n = {len(pixels)} here"
            remedy = "Flatten the embeddings of each picture."
            raise_input_error("backbone", constraint, f"{shape} of {backbone}", remedy)
        return embeddings.float().cpu()

    return PictureExtractor(prepare, embed, {"backbone": backbone, "weights": origin, "preprocessing": {"size": size}})


def _make_picture_job(image_set: ImageSet, options: ExtractOptions, extractor: PictureExtractor) -> EmbeddingJob:
    """Make the job that embeds a set of pictures or, with the option ``--maps``, computes their feature maps."""
    network, shape, batch = extractor.embed, None, options.batch
    if options.maps:
        if extractor.embed_maps is None:
            constraint, got = "come with efficientnet, or a checkpoint of convolutions", extractor.settings["backbone"]
            raise_input_error("maps", constraint, got, "Pass one of these.")
        network = extractor.embed_maps
        shape = _infer_map_shape(network, extractor.preprocess(make_blank_picture())[None])
    files: list[str] | None = None
    labels: Sequence[str]
    sides: Sequence[str] | None
    if image_set.is_packed:
        data = load_pictures(image_set)
        labels, sides = _list_labels_and_sides(data)

        def take(start: int) -> Sequence[ImageSource]:
            pixels = data.x[start : start + batch].unflatten(1, data.shape or ()).permute(0, 2, 3, 1).numpy().copy()
            data.release_memory()
            return list(pixels)
    else:
        pictures, labels, sides = image_set.read_pictures()
        paths = [picture.path if isinstance(picture, RotatedPicture) else picture for picture in pictures]
        files = [os.path.relpath(path, image_set.root) for path in paths if isinstance(path, Path)]

        def take(start: int) -> Sequence[ImageSource]:
            return pictures[start : start + batch]

    def prepare(picture: ImageSource) -> Tensor:
        return extractor.preprocess(open_picture(picture, extractor.min_side).convert("RGB"))

    # Batches of pictures that are decoded while another one is embedded.
    n_prefetched_batches = 2

    def embed(first: int) -> Iterator[np.ndarray]:
        waiting: deque[list[Future[Tensor]]] = deque()
        starts = iter(range(first, len(labels), batch))
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            try:
                while True:
                    while len(waiting) <= n_prefetched_batches and (start := next(starts, None)) is not None:
                        waiting.append([pool.submit(prepare, picture) for picture in take(start)])
                    if not waiting:
                        return
                    prepared = torch.stack([future.result() for future in waiting.popleft()])
                    yield network(prepared).flatten(1).numpy()
            finally:
                pool.shutdown(cancel_futures=True)

    if len(set(labels)) < 2:
        raise_input_error("data", "have at least 2 classes", len(set(labels)), "Add a folder of another class.")
    made, state = {"data": options.data, **extractor.settings}, hash_file_stamps(image_set, "")
    return EmbeddingJob(
        labels=labels,
        split_sides=sides,
        inputs=files,
        embed_from=embed,
        batch_size=batch,
        provenance=made,
        source_hash=state,
        map_shape=shape,
    )


def _infer_map_shape(network: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, int, int]:
    """Return (channels, height, width) of a network's feature maps, by running the network on the input ``x``."""
    with torch.no_grad():
        _, channels, height, width = network(x).shape
    return channels, height, width


def _list_labels_and_sides(data: Dataset) -> tuple[list[str], list[str] | None]:
    """Return two lists: the class name of each row, and the side of each row's class; None if there is no split."""
    labels = data.y.tolist()
    sides = None if data.sides is None else [data.sides[label] for label in labels]
    return [data.class_names[label] for label in labels], sides


def _make_row_job(options: ExtractOptions, device: str) -> EmbeddingJob:
    """Make the job that embeds the rows of a data set by a meta-trained encoder, a checkpoint of ``train``."""
    path = options.backbone
    if options.texts or options.weights:
        got = f"`{'texts' if options.texts else 'weights'}` with {path}"
        raise_input_error("backbone", "be another than a checkpoint of ours, to take this", got, "Leave it out.")
    data = load_source(options.data, image_size=options.image_size)
    encoder, shape = load_trained_encoder(path, dim=data.x.shape[1]).encoder.to(device), None
    if options.maps:
        convolutions = select_convolutions(encoder)
        if convolutions is None:
            remedy = "Train one of conv, conv4 or resnet12."
            raise_input_error("maps", "come with an encoder of convolutions", path, remedy)
        encoder, shape = convolutions, _infer_map_shape(convolutions, torch.zeros(1, data.x.shape[1], device=device))

    def embed(first: int) -> Iterator[np.ndarray]:
        for rows in torch.arange(first, len(data.y)).split(EMBED_BATCH_SIZE):
            with torch.no_grad():
                yield encoder(data.get_rows(rows).float().to(device)).flatten(1).cpu().numpy()

    labels, sides = _list_labels_and_sides(data)
    state = hash_class_rows(data.get_rows, index_classes(data.y))
    made = {"data": options.data, "backbone": path, "weights": hash_file(Path(path))}
    return EmbeddingJob(
        labels=labels,
        split_sides=sides,
        embed_from=embed,
        batch_size=EMBED_BATCH_SIZE,
        provenance=made,
        source_hash=state,
        map_shape=shape,
    )


def select_convolutions(encoder: nn.Module) -> nn.Sequential | None:
    """Select an encoder's layers up to the output of the last feature maps; None if it is not convolutional."""
    layers = list(encoder.children())
    n_layers = len(layers)
    while layers and isinstance(layers[-1], (nn.Flatten, nn.AdaptiveAvgPool2d)):
        layers.pop()
    return None if len(layers) == n_layers else nn.Sequential(*layers)


def _make_class_prompt_job(options: ExtractOptions, extractor: PictureExtractor) -> EmbeddingJob:
    """Make the job that embeds one text for each class and template, such as "a photo of a NAME."."""
    embed_texts, data, templates = extractor.embed_texts, options.data, options.template or (CLIP_PROMPT_TEMPLATE,)
    if embed_texts is None:
        got = extractor.settings["backbone"]
        remedy = "Pass a network of pictures and texts."
        raise_input_error("texts", "come with `backbone` open_clip:NAME:TAG", got, remedy)
    image_set = locate_pictures(data) if Path(data).is_dir() or ":" in data else None
    if image_set is None or image_set.is_packed:
        classes = list((load_source(data) if image_set is None else load_pictures(image_set)).class_names)
    else:
        classes = sorted(set(image_set.read_pictures().labels))
    words = get_class_words(classes, options.names)
    texts = [template.replace("{}", word) for word in words for template in templates]

    def embed(first: int) -> Iterator[np.ndarray]:
        for start in range(first, len(texts), PICTURE_BATCH_SIZE):
            yield embed_texts(texts[start : start + PICTURE_BATCH_SIZE]).numpy()

    labels = [label for label in classes for _ in templates]
    made = {"data": data, **extractor.settings, "templates": list(templates)}
    step = PICTURE_BATCH_SIZE
    return EmbeddingJob(
        labels=labels, inputs=texts, embed_from=embed, batch_size=step, provenance=made, source_hash=str(texts)
    )


def get_class_words(classes: Sequence[str], names: str | None) -> list[str]:
    """Return for each class the words by which texts name it, such as "black footed albatross".

    Words are read from ``names``, a file with a line for each class. If it is None, they are the class name without a
    leading number, with blanks for underscores. An InputError is raised for a class without words.
    """
    if names is None:
        bad = [name for name in classes if re.fullmatch(r"n?\d+", name)]
        if bad:
            got = f"{len(bad)} such as {bad[0]}"
            remedy = "Pass a file of lines."
            raise_input_error("names", "say what classes are called whose names are no words", got, remedy)
        return [re.sub(r"^\d+\.", "", name).replace("_", " ").strip() for name in classes]
    try:
        lines = Path(names).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        remedy = "Check it."
        raise_input_error("names", "be a file of text that can be read", f"{names} ({type(error).__name__})", remedy)
    known: dict[str, str] = {}
    for line in lines:
        for separator in ("\t", ",", " "):
            name, _, words = line.strip().partition(separator)
            if name.strip() in classes:
                known[name.strip()] = words.split(",")[0].strip()
                break
    missing = [name for name in classes if not known.get(name)]
    if missing:
        got = f"none for {len(missing)} of {len(classes)}, such as {missing[0]!r}"
        raise_input_error("names", "have a line of each class", got, "Write its name, a comma and its words.")
    return [known[name] for name in classes]
