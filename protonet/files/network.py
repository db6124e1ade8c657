"""A network as a config that JSON can hold, and as the tensors of its ``state_dict``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from protonet.encoder import Encoder
from protonet.network import PrototypeNetwork
from protonet.views import SOURCES, VIEW_FAMILIES
from protonet.views.config import check_tensors, expect
from protonet.views.view import Component, Source, View

ComponentT = TypeVar("ComponentT", Source, View)
#: The state that follows from the rest.
DERIVED = "prototypes"


def describe_network(network: PrototypeNetwork) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config from which `build_network` builds the network, and its state by name.

    Args:
        network: With an `Encoder`, on any device.
    """
    encoder = _get_encoder(network)
    config = {
        "input_dim": encoder.input_dim,
        "classes": len(network.counts),
        "sources": [{"kind": source.kind, **source.config.to_json()} for source in encoder.list_sources()],
        "views": [
            {"kind": view.kind, "source": number, **view.config.to_json()}
            for view, number in zip(encoder.list_views(), encoder.reads, strict=True)
        ],
    }
    return config, {name: tensor for name, tensor in network.state_dict().items() if name != DERIVED}


def build_network(config: Any) -> PrototypeNetwork:
    """Build a network from a config that is not trusted; all tensors are zero until ``load_state_dict``.

    Raises:
        ValueError: Not the config of a network; the reason in a few words.
    """
    expect(isinstance(config, dict), "no config of a network")
    dim, classes = (config.get(name) for name in ("input_dim", "classes"))
    expect(type(dim) is int and type(classes) is int and min(dim, classes) > 0, "no usable input_dim or classes")
    sources: list[Source] = []
    for entry in _take_entries(config, "sources"):
        kind = _find_kind(entry, SOURCES)
        source_config = kind.config_type.from_json(entry)
        expect(getattr(source_config, "input_dim", None) == dim, "a source of another number of features")
        sources.append(kind(source_config))
    views: list[View] = []
    for entry in _take_entries(config, "views"):
        view, number = _find_kind(entry, [view for _, view in VIEW_FAMILIES]), entry.pop("source", None)
        expect(number is None or (type(number) is int and 0 <= number < len(sources)), "a view of an unknown source")
        views.append(view(view.config_type.from_json(entry), None if number is None else sources[number]))
        expect(views[-1].input_dim == dim, "a view of another number of features")
    expect(bool(views), "no view")
    expect({view.source for view in views} - {None} == set(sources), "a source for no view")
    encoder = Encoder(views, torch.zeros(sum(len(view.sizes) for view in views)), origin=torch.zeros(dim))
    return PrototypeNetwork(encoder, embedding_dim=encoder.embedding_dim, num_classes=classes).eval()


def check_network(network: PrototypeNetwork, tensors: Mapping[str, Tensor]) -> None:
    """Check tensors that are not trusted before a network loads them.

    Args:
        network: Of `build_network`, on any device; the meta device will do.
        tensors: By name as in ``state_dict``, without the prototypes; on the CPU.

    Raises:
        ValueError: They are no state of this network; the reason in a few words.
    """
    rest, own = dict(tensors), network.state_dict()
    del own[DERIVED]
    for prefix, component in _list_components(network):
        names = [name for name in rest if name.startswith(prefix)]
        component.check({name.removeprefix(prefix): rest.pop(name) for name in names}, prefix)
        own = {name: tensor for name, tensor in own.items() if not name.startswith(prefix)}
    check_tensors(rest, own)
    weights = rest["encoder.weights"]
    expect(bool((weights >= 0).all()) and abs(float(weights.sum()) - 1) < 1e-3, "weights that are no shares")
    positive = all(bool(rest[name] > 0) for name in ("encoder.scale", "temperature"))
    expect(positive, "a scale or temperature that is not positive")
    expect(bool((rest["counts"] >= 0).all()), "counts below 0")


@torch.inference_mode(False)
def restore_network(config: Any, tensors: Mapping[str, Tensor]) -> PrototypeNetwork:
    """Build and load a network, trusting neither the config nor the tensors.

    Args:
        config: Of `describe_network`.
        tensors: Of the same, on the CPU; they become the network's.

    Returns:
        The network in eval mode.

    Raises:
        ValueError: They are no network; the reason in a few words.
    """
    sums, origin = tensors.get("sums"), tensors.get("encoder.origin")
    expect(sums is not None and origin is not None, "no tensor sums or encoder.origin")
    expect(isinstance(config, dict), "no config of a network")
    expect(list(origin.shape) == [config.get("input_dim")], "of another number of features")  # type: ignore[union-attr]
    expect(len(sums) == config.get("classes"), "sums of other classes")  # type: ignore[arg-type]
    with torch.device("meta"):  # nothing is allocated before sizes are known to be those of tensors
        network = build_network(config)
    check_network(network, tensors)
    tensors = {name: each.clone() if each.is_inference() else each for name, each in tensors.items()}  # trainable later
    network.load_state_dict({**tensors, DERIVED: torch.zeros_like(tensors["sums"])}, assign=True)
    network.set_sums(network.sums, network.counts)
    return network


def _get_encoder(network: PrototypeNetwork) -> Encoder:
    if not isinstance(network.encoder, Encoder):
        raise TypeError(type(network.encoder).__name__)
    return network.encoder


def _find_kind(entry: dict[str, Any], classes: Sequence[type[ComponentT]]) -> type[ComponentT]:
    """Return the class that an entry names, and take the name out of the entry."""
    kind = entry.pop("kind", None)
    for each in classes:
        if each.kind == kind:
            return each
    raise ValueError("a source or view of an unknown kind")


def _take_entries(config: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield copies of the mappings that a list in a config holds."""
    entries = config.get(name)
    usable = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    expect(usable, f"no usable entry {name}")
    yield from map(dict, entries)  # type: ignore[arg-type]


def _list_components(network: PrototypeNetwork) -> Iterator[tuple[str, Component]]:
    """Yield every source and view with what the names of its tensors begin with."""
    encoder = _get_encoder(network)
    for group, components in (("sources", encoder.list_sources()), ("views", encoder.list_views())):
        for number, component in enumerate(components):
            yield f"encoder.{group}.{number}.", component
