"""Cross-fits in model files: rows once, fold models in half precision where a small error does not harm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protonet.encoder import Encoder
from protonet.files.model import describe_network, restore_network
from protonet.fit.crossfit import Crossfit, need_encoder
from protonet.network import PrototypeNetwork
from protonet.views.view import expect


@dataclass(frozen=True)
class PackRules:
    """What of fold models a file rounds; their probabilities move by less than 1e-3, as a test says."""

    halved: re.Pattern[str] = re.compile(r"sums|sources\.\d+\.basis|views\.\d+\.stack\.(first|last)")
    """Tensors that may have half precision: means, directions, and what was trained."""
    few: int = 256  #: Samples of a class up to which its sum may: half precision tells one more of them.
    error: float = 5e-4  #: Next to the root mean square.
    most_mixed: int = 1024  #: Rows that directions are told as mixtures of, at the most ...
    rounding: float = 1e-12  #: ... without what varies by a smaller share of the most.


PACK = PackRules()


def pack(crossed: Crossfit) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return all but the network of all rows for a model file: what JSON holds, and tensors by name.

    Rows are in the units of the networks, which remember the same ones. In fold models, directions are told as mixtures
    of these rows where there are fewer rows than features, and what a small error does not harm has half precision.
    """
    structures: list[dict[str, Any]] = []
    tensors = {name: getattr(crossed, name) for name in Crossfit._fields[2:]}
    encoder = need_encoder(crossed.whole)
    rows = ((crossed.features - encoder.origin) / encoder.scale).float()
    if torch.equal(_as_they_came(encoder, rows), crossed.features):
        del tensors["features"]
        tensors["rows"] = rows
    for number, network in enumerate(crossed.folds):
        structure, own = describe_network(network)
        structures.append(structure)
        few = int(network.counts.max()) <= PACK.few  # of more, a half sum would lose one that is added
        for name, tensor in (_mix(own, rows) if "rows" in tensors else own).items():
            halved = PACK.halved.fullmatch(name) and (few or name != "sums")
            tensors[f"{number}.{name}"] = _halve(tensor) if halved else tensor
    return structures, tensors


def _as_they_came(encoder: Encoder, rows: Tensor) -> Tensor:
    """Return rows (n, dim) in the units of an encoder's views as they came: float64 where float32 would lose digits."""
    x = rows * encoder.scale
    return x.double() + encoder.origin if bool(encoder.origin.any()) else x


def _mix(tensors: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a network with mixtures of rows (n, dim) for the directions that are such.

    The directions that a view is whitened along are mixtures of the rows that it was fitted to, less any mean of them.
    """
    found = dict(tensors)
    for name, basis in tensors.items():
        if not name.endswith(".basis") or not basis.shape[1] or not len(rows) <= min(PACK.most_mixed, len(basis) // 2):
            continue
        centred = _centre(tensors, name, rows, len(basis)).double()
        inverse = torch.linalg.pinv(centred @ centred.T, rtol=PACK.rounding, hermitian=True)
        mixture = (inverse @ (centred @ basis.double())).float()
        for tried in (mixture.half(), mixture):
            if _is_close(centred.float().T @ tried.float(), basis):
                found[f"{name.removesuffix('basis')}mixture"] = tried
                del found[name]
                break
    return found


def _unmix(tensors: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return what `_mix` was given, from tensors that may be anything; raise a ValueError if there is no such thing."""
    found = dict(tensors)
    for name, mixture in tensors.items():
        if name.endswith(".mixture"):
            part = name.removesuffix("mixture")
            shift, first = (tensors.get(f"{part}{each}", torch.tensor(0)) for each in ("shift", "first"))
            sound = (
                shift.ndim == 1
                and shift.dtype == rows.dtype == torch.float32
                and first.ndim == 0
                and first.dtype == torch.int64
            )
            sound = sound and 0 <= int(first) <= rows.shape[1] - len(shift) and mixture.is_floating_point()
            expect(sound and mixture.ndim == 2 and len(mixture) == len(rows), "a mixture of other rows")
            found[f"{part}basis"] = _centre(tensors, name, rows, len(shift)).T @ found.pop(name).float()
    return found


def _centre(tensors: Mapping[str, Tensor], name: str, rows: Tensor, dim: int) -> Tensor:
    """Return the columns (n, dim) of rows that a linear map, one tensor of which is named, reads, less its shift."""
    part = name.rpartition(".")[0]
    first = int(tensors.get(f"{part}.first", torch.tensor(0)))
    return rows[:, first : first + dim] - tensors[f"{part}.shift"]


def _halve(tensor: Tensor) -> Tensor:
    """Return a tensor in half precision, where that is as good."""
    half = tensor.half()
    return half if tensor.dtype == torch.float32 and _is_close(half.float(), tensor) else tensor


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    """Return whether a tensor is another one, but for a small error next to its root mean square."""
    return bool((found - wanted).square().mean() <= PACK.error**2 * wanted.square().mean())


def unpack(network: PrototypeNetwork, structures: Any, tensors: Mapping[str, Tensor]) -> Crossfit:
    """Return what `pack` packed, given the network of all rows.

    Raises:
        ValueError: It is not what `pack` packs; the reason in a few words.
    """
    expect(isinstance(structures, list), "no list of folds")
    own, encoder = dict(tensors), need_encoder(network)
    if "rows" in own:
        rows = own["rows"]
        sound = rows.ndim == 2 and rows.shape[1] == encoder.input_dim and rows.dtype == torch.float32
        expect(sound, "rows held out of another shape or type")
        own["features"] = _as_they_came(encoder, rows)
    expect(set(Crossfit._fields[2:]) <= own.keys(), "no rows that were held out")
    folds = []
    for number, structure in enumerate(structures):
        prefix = f"{number}."
        parts = {name.removeprefix(prefix): tensor for name, tensor in own.items() if name.startswith(prefix)}
        parts = _unmix(parts, own.get("rows", own["features"]))
        parts = {name: each.float() if each.dtype == torch.float16 else each for name, each in parts.items()}
        folds.append(restore_network(structure, parts))
        expect(len(folds[-1].counts) == len(network.counts), "folds of other classes")
    x, labels, weights, fold, groups, offset = held = [own[name] for name in Crossfit._fields[2:]]
    number_like = offset.shape == () and offset.dtype == torch.float64 and bool(torch.isfinite(offset))
    expect(number_like, "an offset that is no number")
    shapes = x.shape == (len(labels), network.encoder.input_dim)
    shapes = shapes and labels.shape == weights.shape == fold.shape == groups.shape
    kinds = x.dtype in {torch.float32, torch.float64} and {labels.dtype, fold.dtype, groups.dtype} == {torch.int64}
    expect(
        shapes and labels.ndim == 1 and kinds and weights.dtype == torch.float64,
        "rows held out of another shape or type",
    )
    sound = bool(torch.isfinite(x).all()) and bool((torch.isfinite(weights) & (weights > 0)).all())
    expect(sound, "rows held out that are not finite, or have no weight")
    for values, high in ((labels, len(network.counts)), (fold, len(folds))):
        expect(bool(((values >= 0) & (values < high)).all()), "rows held out of no class or no fold")
    return Crossfit(network, tuple(folds), *held)
