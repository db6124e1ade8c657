"""What a network is made of: a description that JSON can hold, and tensors by name. And back, trusting neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from protonet._checks import fail_type
from protonet.encoder import Encoder, ResidualMLPs
from protonet.network import PrototypeNetwork
from protonet.views.forest import MAX_DEPTH, ForestView, Nodes
from protonet.views.linear import LinearView
from protonet.views.radial import RadialKind, RadialView

#: A view's constant coordinate is no larger.
MOST_LIFT = 1e6
#: The entries of a description.
_STRUCTURE = {"lifts": list, "views": list, "learned": bool}


def take_apart(network: PrototypeNetwork) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Describe a network.

    Args:
        network: With the encoder that `protonet.solve` gives.

    Returns:
        structure: What its tensors do not tell, as JSON can hold it.
        tensors: Its parameters and buffers by name, the linear views that several views read once.

    Raises:
        TypeError: The encoder is of another kind.
    """
    encoder = network.encoder
    if not isinstance(encoder, Encoder):
        remedy = "Pass a network of protonet.solve."
        fail_type("take_apart", "network", "have a protonet.Encoder", type(encoder).__name__, remedy)
    linear: dict[LinearView, int] = {}
    views: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for index, view in enumerate(encoder.views):
        if isinstance(view, ForestView):
            views.append({"kind": "forest", "depth": view.depth, "classes": view.embedding_dim})
        elif isinstance(view, RadialView):
            reads = linear.setdefault(view.view, len(linear))
            views.append({"kind": "radial", "reads": reads, "norm": view.norm, "squash": view.squash})
        else:
            assert isinstance(view, LinearView)
            views.append({"kind": "linear", "reads": linear.setdefault(view, len(linear))})
            continue
        tensors |= {f"views.{index}.{name}": tensor for name, tensor in view.named_buffers(recurse=False)}
    for view, number in linear.items():
        tensors |= {f"linear.{number}.{name}": tensor for name, tensor in view.named_buffers()}
    if encoder.learned is not None:
        tensors |= {f"learned.{name}": tensor for name, tensor in encoder.learned.named_parameters()}
    tensors |= dict(encoder.named_buffers(recurse=False)) | dict(network.named_buffers(recurse=False))
    lifts = [view.lift for view in linear]
    return {"lifts": lifts, "views": views, "learned": encoder.learned is not None}, tensors


@torch.inference_mode(False)
def put_together(structure: Any, tensors: Mapping[str, Tensor]) -> PrototypeNetwork:
    """Build the network that `take_apart` described, from a description that may say anything.

    Args:
        structure: The description.
        tensors: The tensors by name, on the CPU.

    Returns:
        The network in eval mode.

    Raises:
        ValueError: What the two say is no network; the reason in a few words.
    """
    left = dict(tensors)
    lifts, parts, learns = (_entry(structure, name, kind) for name, kind in _STRUCTURE.items())
    linear: list[LinearView] = []
    for number, lift in enumerate(lifts):
        expect(type(lift) in {int, float} and 0 <= lift <= MOST_LIFT, "a constant coordinate out of range")
        linear.append(_build_linear(left, f"linear.{number}.", linear[0].dim if linear else None, lift))
    views: list[LinearView | RadialView | ForestView] = []
    for index, part in enumerate(parts):
        kind = _entry(part, "kind", str)
        if kind == "forest":
            views.append(_build_forest(left, f"views.{index}.", part, linear[0].dim if linear else 0))
            continue
        view = linear[_whole(part, "reads", len(linear) - 1)]
        expect(kind in {"linear", "radial"}, "a view of an unknown kind")
        views.append(view if kind == "linear" else _build_radial(left, f"views.{index}.", part, view))
    expect(bool(views) and isinstance(views[0], LinearView), "no linear view comes first")
    learned = _build_learned(left, linear[0].dim) if learns else None
    weights = _take(left, "weights", len(views) + (len(learned.last) if learned else 0))
    expect(bool((weights >= 0).all()) and abs(float(weights.sum()) - 1) < 1e-3, "weights that are no shares")
    encoder = Encoder(views, weights, learned=learned)
    prototypes = _take(left, "prototypes", None, encoder.embedding_dim)
    network = PrototypeNetwork(encoder, embedding_dim=prototypes.shape[1], num_classes=len(prototypes))
    encoder.weights, network.prototypes = weights, prototypes
    network.seen = _take(left, "seen", len(prototypes), dtype=torch.bool)
    encoder.scale, network.temperature = _take(left, "scale"), _take(left, "temperature")
    expect(bool(encoder.scale > 0) and bool(network.temperature > 0), "a scale or temperature that is not positive")
    expect(not left, "tensors that belong to no view")
    return network.eval()


def expect(holds: bool, otherwise: str) -> None:
    """Raise a ValueError that says what there is otherwise."""
    if not holds:
        raise ValueError(otherwise)


def expect_sound(name: str, tensor: Tensor) -> None:
    """Raise a ValueError where a tensor has NaN, an infinity that is no leaf's threshold, or a bool beyond 0 and 1."""
    if tensor.dtype == torch.bool:
        expect(bool((tensor.view(torch.uint8) <= 1).all()), f"a tensor {name} that is not of yes and no")
    finite = tensor > -torch.inf if name.endswith(".threshold") else torch.isfinite(tensor)
    expect(bool(finite.all()), f"a tensor {name} that is not finite")


def _entry(mapping: Any, name: str, kind: type) -> Any:
    """Return a mapping's entry of this very type."""
    expect(isinstance(mapping, dict) and type(mapping.get(name)) is kind, f"no usable entry {name}")
    return mapping[name]


def _whole(mapping: Any, name: str, high: int, low: int = 0) -> int:
    """Return a mapping's entry, a whole number in [low, high]."""
    number: int = _entry(mapping, name, int)
    expect(low <= number <= high, f"an entry {name} out of range")
    return number


def _take(left: dict[str, Tensor], name: str, *shape: int | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Take a tensor out, a sound one of this dtype and shape (None: any size)."""
    expect(name in left, f"no tensor {name}")
    tensor = left.pop(name)
    fits = tensor.ndim == len(shape) and all(
        asked in {None, size} for size, asked in zip(tensor.shape, shape, strict=True)
    )
    expect(fits and tensor.dtype == dtype, f"a tensor {name} of another shape or type")
    expect_sound(name, tensor)
    return tensor


def _build_linear(left: dict[str, Tensor], prefix: str, dim: int | None, lift: float) -> LinearView:
    """Build one linear view of ``dim`` features, None for any number of them."""
    shift, coefficient = _take(left, f"{prefix}shift", dim), _take(left, f"{prefix}coefficient", None)
    expect(len(shift) > 0, "a view of no feature")
    gain = _take(left, f"{prefix}gain", len(shift))
    return LinearView(shift, gain, _take(left, f"{prefix}basis", len(shift), len(coefficient)), coefficient, lift=lift)


def _build_radial(left: dict[str, Tensor], prefix: str, part: Any, view: LinearView) -> RadialView:
    """Build one radial view."""
    kind = RadialKind("", "", _whole(part, "norm", 2, low=1), squash=_entry(part, "squash", bool))
    landmarks = _take(left, f"{prefix}landmarks", None, view.dim)
    width = float(_take(left, f"{prefix}width"))
    expect(width > 0, "a width that is not positive")
    return RadialView(view, kind, landmarks, _take(left, f"{prefix}readout", len(landmarks), None), width)


def _build_forest(left: dict[str, Tensor], prefix: str, part: Any, dim: int) -> ForestView:
    """Build one forest, in which every way from a root ends within the nodes."""
    threshold = _take(left, f"{prefix}threshold", None)
    nodes = len(threshold)
    root = _take(left, f"{prefix}root", None, dtype=torch.int64)
    feature, child, label = (
        _take(left, f"{prefix}{name}", nodes, dtype=torch.int64) for name in ("feature", "child", "label")
    )
    expect(len(root) > 0, "a forest without trees")
    classes = _whole(part, "classes", 2**31)
    right = child + torch.isfinite(threshold)  # a row never goes to the right of a leaf
    limits = (("root", root, nodes), ("feature", feature, dim), ("child", child, nodes), ("child", right, nodes))
    for name, value, high in (*limits, ("label", label, classes)):
        expect(bool(((value >= 0) & (value < high)).all()), f"a tensor {prefix}{name} out of range")
    depth = _whole(part, "depth", MAX_DEPTH)
    return ForestView(Nodes(root, feature, threshold, child, label), depth=depth, num_classes=classes)


def _build_learned(left: dict[str, Tensor], dim: int) -> ResidualMLPs:
    """Build the learned views of ``dim`` features."""
    first = _take(left, "learned.first", None, dim, None)
    members, _, width = first.shape
    bias, last = _take(left, "learned.bias", members, 1, width), _take(left, "learned.last", members, width, None)
    expect(last.shape[2] >= dim, "learned views with fewer dimensions than features")
    learned = ResidualMLPs(members, dim, width, last.shape[2], torch.Generator())
    learned.load_state_dict({"first": first, "bias": bias, "last": last})
    return learned
