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
#: A buffer that is computed from others, and not stored.
DERIVED_BUFFER = "prototypes"


def describe_network(network: PrototypeNetwork) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split a network into a config for `build_network`, and its tensors by name.

    Args:
        network: A network with an `Encoder`, on any device.
    """
    encoder = _get_encoder(network)
    config = {
        "input_dim": encoder.input_dim,
        "classes": len(network.counts),
        "sources": [{"kind": source.kind, **source.config.to_json()} for source in encoder.list_sources()],
        "views": [
            {"kind": view.kind, "source": index, **view.config.to_json()}
            for view, index in zip(encoder.list_views(), encoder.source_index, strict=True)
        ],
    }
    return config, {name: tensor for name, tensor in network.state_dict().items() if name != DERIVED_BUFFER}


def build_network(config: Any) -> PrototypeNetwork:
    """Build a network from a config that is not trusted; all tensors are zero until ``load_state_dict``.

    Raises:
        ValueError: The config is invalid.
    """
    expect(isinstance(config, dict), "no config of a network")
    dim, classes = (config.get(name) for name in ("input_dim", "classes"))
    expect(type(dim) is int and type(classes) is int and min(dim, classes) > 0, "no usable input_dim or classes")
    sources: list[Source] = []
    for entry in _copy_entries(config, "sources"):
        source_class = _pop_class(entry, SOURCES)
        source_config = source_class.config_type.from_json(entry)
        expect(getattr(source_config, "input_dim", None) == dim, "a source of another number of features")
        sources.append(source_class(source_config))
    views: list[View] = []
    for entry in _copy_entries(config, "views"):
        view_class, index = _pop_class(entry, [view for _, view in VIEW_FAMILIES]), entry.pop("source", None)
        expect(index is None or (type(index) is int and 0 <= index < len(sources)), "a view of an unknown source")
        views.append(view_class(view_class.config_type.from_json(entry), None if index is None else sources[index]))
        expect(views[-1].input_dim == dim, "a view of another number of features")
    expect(bool(views), "no view")
    expect({view.source for view in views} - {None} == set(sources), "a source for no view")
    encoder = Encoder(views, torch.zeros(sum(len(view.sizes) for view in views)), origin=torch.zeros(dim))
    return PrototypeNetwork(encoder, embedding_dim=encoder.embedding_dim, num_classes=classes).eval()


def check_network(network: PrototypeNetwork, tensors: Mapping[str, Tensor]) -> None:
    """Validate the tensors of a file before a network loads them.

    Args:
        network: From `build_network`, on any device, including the meta device.
        tensors: By name as in ``state_dict``, without the prototypes; on the CPU.

    Raises:
        ValueError: The tensors are not a valid state of this network.
    """
    unchecked, expected = dict(tensors), network.state_dict()
    del expected[DERIVED_BUFFER]
    for prefix, component in _list_components(network):
        names = [name for name in unchecked if name.startswith(prefix)]
        component.check({name.removeprefix(prefix): unchecked.pop(name) for name in names}, prefix)
        expected = {name: tensor for name, tensor in expected.items() if not name.startswith(prefix)}
    check_tensors(unchecked, expected)
    weights = unchecked["encoder.weights"]
    expect(bool((weights >= 0).all()) and abs(float(weights.sum()) - 1) < 1e-3, "weights that do not sum to 1")
    positive = all(bool(unchecked[name] > 0) for name in ("encoder.scale", "temperature"))
    expect(positive, "a scale or temperature that is not positive")
    expect(bool((unchecked["counts"] >= 0).all()), "counts below 0")


@torch.inference_mode(False)
def restore_network(config: Any, tensors: Mapping[str, Tensor]) -> PrototypeNetwork:
    """Build a network from a config and load tensors, after validation of both.

    Args:
        config: From `describe_network`.
        tensors: From `describe_network`, on the CPU; the network takes them over without a copy.

    Returns:
        The network in eval mode.

    Raises:
        ValueError: The config or a tensor is invalid.
    """
    sums, origin = tensors.get("sums"), tensors.get("encoder.origin")
    expect(sums is not None and origin is not None, "no tensor sums or encoder.origin")
    expect(isinstance(config, dict), "no config of a network")
    expect(list(origin.shape) == [config.get("input_dim")], "of another number of features")  # type: ignore[union-attr]
    expect(len(sums) == config.get("classes"), "sums of other classes")  # type: ignore[arg-type]
    with torch.device("meta"):  # no memory is allocated before the sizes are compared with the tensors
        network = build_network(config)
    check_network(network, tensors)
    # Inference tensors could not be trained later.
    tensors = {name: value.clone() if value.is_inference() else value for name, value in tensors.items()}
    network.load_state_dict({**tensors, DERIVED_BUFFER: torch.zeros_like(tensors["sums"])}, assign=True)
    network.set_sums(network.sums, network.counts)
    return network


def _get_encoder(network: PrototypeNetwork) -> Encoder:
    if not isinstance(network.encoder, Encoder):
        raise TypeError(type(network.encoder).__name__)
    return network.encoder


def _pop_class(entry: dict[str, Any], classes: Sequence[type[ComponentT]]) -> type[ComponentT]:
    """Remove the kind from an entry, and return the class of that kind."""
    kind = entry.pop("kind", None)
    for component_class in classes:
        if component_class.kind == kind:
            return component_class
    raise ValueError("a source or view of an unknown kind")


def _copy_entries(config: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Copy the mappings in a list of a config."""
    entries = config.get(name)
    usable = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    expect(usable, f"no usable entry {name}")
    yield from map(dict, entries)  # type: ignore[arg-type]


def _list_components(network: PrototypeNetwork) -> Iterator[tuple[str, Component]]:
    """Yield every source and view with the prefix of the names of its tensors."""
    encoder = _get_encoder(network)
    for group, components in (("sources", encoder.list_sources()), ("views", encoder.list_views())):
        for index, component in enumerate(components):
            yield f"encoder.{group}.{index}.", component
