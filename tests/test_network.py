"""Networks and encoders: cosines to prototypes, updates, precision, and parts of the embedding."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from protonet import PrototypeNetwork, solve
from protonet.errors import InputError, InputTypeError
from protonet.losses import class_means
from protonet.network import Encoder, split_weights
from protonet.views.linear import LinearSpec
from protonet.views.mlp import MLPView, ResidualMLPs
from protonet.views.view import TrainingRows, View
from tests.strategies import blobs, same_state, seeds


def make_network(seed: int = 0, *, num_classes: int = 5) -> PrototypeNetwork:
    encoder = make_encoder([0.3, 0.0, 0.3, 0.4], seed=seed)
    network = PrototypeNetwork(encoder, embedding_dim=encoder.embedding_dim, num_classes=num_classes)
    network.set_prototypes(*blobs(seed))
    return network.eval()


def test_logits_are_cosines_to_class_means_over_temperature() -> None:
    x, y = blobs(1)
    network = PrototypeNetwork(nn.Identity(), embedding_dim=8, num_classes=5, temperature=0.25)
    network.set_prototypes(x, y)
    means, _ = class_means(F.normalize(x, dim=1), y, 5)
    expected = F.cosine_similarity(x[:, None], means[None], dim=2) / 0.25
    torch.testing.assert_close(network(x), expected)


CHANGES: dict[str, Callable[[PrototypeNetwork, torch.Tensor, torch.Tensor], object]] = {
    "none": lambda network, x, y: None,
    "set_prototypes": lambda network, x, y: network.set_prototypes(x, y),
    "state_dict": lambda network, x, y: network.load_state_dict(make_network(3).state_dict()),
    "float64": lambda network, x, y: network.to(torch.float64),
    "add_class": lambda network, x, y: network.add_class(x),
    "add_samples": lambda network, x, y: network.add_samples(x, y, num_classes=7),
    "arrange_classes": lambda network, x, y: network.arrange_classes(torch.tensor([4, -1, 0])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_buffers_are_never_parameters(change: str) -> None:
    changed, (x, y) = make_network(), blobs(2)
    CHANGES[change](changed, x.requires_grad_(True), y)
    for network in (changed, copy.deepcopy(changed)):
        assert network.prototypes.dtype == network(x).dtype == (torch.float64 if change == "float64" else torch.float32)
        encoder_size = sum(p.numel() for p in network.encoder.parameters())
        assert network.count_parameters() == sum(p.numel() for p in network.parameters()) == encoder_size
        assert {"prototypes", "sums", "counts", "temperature"} <= {name for name, _ in network.named_buffers()}
        assert not any(buffer.requires_grad for buffer in network.buffers())
        assert network.count_buffer_elements() == sum(b.numel() for b in network.buffers()) > 0


@given(seed=seeds, keep=st.integers(1, 29))
def test_logits_of_a_row_do_not_depend_on_the_other_rows(seed: int, keep: int) -> None:
    network = make_network()
    x = blobs(seed)[0]
    with torch.no_grad():
        full = network(x)
        assert torch.equal(full, network(x))
        torch.testing.assert_close(network(x[:keep]), full[:keep])
        torch.testing.assert_close(network(x.flip(0)).flip(0), full)


def test_state_dict_round_trip_restores_the_number_of_classes() -> None:
    network = make_network()
    network.add_class(torch.randn(2, 8, generator=torch.Generator().manual_seed(0)))
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    other = make_network(4)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = blobs(6)[0]
    assert torch.equal(other(x), network(x))
    assert other(x).shape == (30, 6)
    for item in (network, other):  # sums and counts are part of the state
        item.add_samples(x, blobs(6)[1])
    assert torch.equal(other(x), network(x))
    assert other.counts.tolist() == [12] * 5 + [2]


def test_classes_without_samples_are_never_predicted() -> None:
    network = make_network(num_classes=9)
    x = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    logits = network(torch.cat([x, torch.zeros(1, 8)])).detach()
    assert bool(torch.isfinite(logits).all())
    assert int(logits.argmax(dim=1).max()) < 5
    assert float(logits.softmax(dim=1)[:, 5:].abs().max()) == 0.0


def test_an_added_class_equals_added_samples_and_leaves_the_others_unchanged() -> None:
    network, other = make_network(), make_network()
    before, new = network.prototypes.clone(), torch.full((3, 8), 4.0)
    assert network.add_class(new) == 5
    assert torch.equal(network.prototypes[:5], before)
    assert network(new).argmax(dim=1).tolist() == [5, 5, 5]
    other.add_samples(new, torch.full((3,), 5), num_classes=6)
    assert same_state(network, other)


@settings(max_examples=8)
@given(seed=seeds, rows=st.integers(1, 30), num_classes=st.integers(5, 8))
def test_sums_and_counts_are_the_slow_loop_over_classes(seed: int, rows: int, num_classes: int) -> None:
    network = make_network()
    x, y = blobs(seed)
    generator = torch.Generator().manual_seed(seed)
    more, labels = torch.randn(rows, 8, generator=generator), torch.randint(num_classes, (rows,), generator=generator)
    network.set_prototypes(x, y)  # forgets the former samples
    network.add_samples(more, labels, num_classes=num_classes)
    assert network.counts.dtype == torch.int64
    for label in range(num_classes):
        samples = torch.cat([x[y == label], more[labels == label]])
        assert int(network.counts[label]) == len(samples)
        assert bool(network.has_samples[label]) == (len(samples) > 0)
        embedded = [network.embed(row[None])[0] for row in samples]
        total = torch.stack(embedded).sum(dim=0) if embedded else torch.zeros(1)
        torch.testing.assert_close(network.sums[label], total.expand(network.sums.shape[1]), atol=1e-4, rtol=1e-4)
        if len(samples):
            mean = make_network().encoder.normalize(total[None] / len(samples))[0]  # type: ignore[operator]
            torch.testing.assert_close(network.prototypes[label], mean, atol=1e-5, rtol=1e-4)
        else:
            assert not bool(network.prototypes[label].any())


@given(seed=seeds, permutation=st.permutations(range(5)), more=st.integers(0, 3))
def test_arranging_back_and_forth_is_the_identity(seed: int, permutation: list[int], more: int) -> None:
    network = make_network(seed % 7)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    order = torch.tensor([*permutation, *[-1] * more])
    network.arrange_classes(order)
    for index, old in enumerate(order.tolist()):
        for name in ("sums", "counts", "prototypes"):
            known = before[name][old] if old >= 0 else torch.zeros_like(before[name][0])
            assert torch.equal(getattr(network, name)[index], known)
    logits = network(blobs(seed)[0]).detach()
    assert logits.shape == (30, 5 + more)
    assert not more or int(logits.argmax(dim=1).max()) < 5
    network.arrange_classes(order.argsort()[more:])
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    sums = network.sums.clone()
    network.arrange_classes(torch.tensor([3, 1]))
    assert torch.equal(network.sums, sums[[3, 1]])  # the others are forgotten
    assert network(blobs(0)[0]).shape == (30, 2)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"embedding_dim": 0}, InputError, "`embedding_dim` must be a whole number >= 1; got 0"),
        ({"num_classes": 0}, InputError, "`num_classes` must be a whole number >= 1; got 0"),
        ({"temperature": 0.0}, InputError, "`temperature` must be a finite number > 0; got 0.0"),
        ({"temperature": "hot"}, InputTypeError, "`temperature` must be a finite number > 0; got 'hot'"),
    ],
)
def test_constructor_errors(settings: dict[str, float], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PrototypeNetwork(nn.Identity(), **{"embedding_dim": 8, "num_classes": 5, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("x", [torch.zeros(8), torch.zeros(4, 1), torch.zeros(4, 9), torch.zeros(2, 2, 5)])
def test_features_of_another_width_are_an_error_everywhere(x: torch.Tensor) -> None:
    network = make_network()
    with pytest.raises(InputError, match=r"`x` must have shape \(n, 8\); got shape \("):
        network(x)
    for call in (
        lambda: network.set_prototypes(x, torch.zeros(len(x), dtype=torch.int64)),
        lambda: network.add_samples(x, torch.zeros(len(x), dtype=torch.int64)),
        lambda: network.add_class(x),
    ):
        with pytest.raises(InputError, match=r"`features` must have (shape \(n, dim\)|8 features per row)"):
            call()


def test_the_network_can_be_trained_after_updates_in_inference_mode() -> None:
    network = make_network()
    with torch.inference_mode():
        network.add_class(blobs(1)[0])
        network.add_samples(*blobs(1))
        network.arrange_classes(torch.arange(6))
    network(blobs(2)[0]).sum().backward()


X, Y = blobs(0)
NINE = r"`labels` must be in \[0, {}\); got 9 \(30 such"


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("set_prototypes", (X, Y * 0 + 9), NINE.format(5)),
        ("set_prototypes", (X[:0], Y[:0]), "`features` must have at least one row; got none"),
        ("add_class", (X[:0],), "`features` must have at least one row; got none"),
        ("add_class", (X * torch.nan,), "`features` must be finite; got NaN or infinity in 30 of 30"),
        ("add_samples", (X, Y * 0 + 9, 6), NINE.format(6)),
        ("add_samples", (X, Y * 0 + 9), NINE.format(5)),
        ("add_samples", (X, Y * 0, 4), "`num_classes` must be a whole number >= 5; got 4"),
        ("add_samples", (X[:0], Y[:0]), "`features` must have at least one row; got none"),
        ("add_samples", (X, Y.float()), "`labels` must be a tensor of integer labels; got torch"),
        ("add_samples", (X.tolist(), Y), r"`features` must be a tensor of shape \(n, dim\); got list"),
    ],
)
def test_errors_leave_the_network_as_it_was(method: str, arguments: tuple[Any, ...], message: str) -> None:
    network = make_network()
    named = dict(zip(("features", "labels", "num_classes"), arguments, strict=False))
    with pytest.raises((InputError, InputTypeError), match=f"^{message}"):
        getattr(network, method)(**named)
    assert same_state(network, make_network())


def test_many_rows_are_classified_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    network, (x, _) = make_network(), blobs(6)
    full = network(x)
    blocks: list[int] = []
    network.encoder.register_forward_hook(lambda _, rows, __: blocks.append(len(rows[0])))
    for name, index, expected in (("CHUNK_ROWS", 7, 7), ("CHUNK_VALUES", 3 * network.prototypes.shape[1], 3)):
        monkeypatch.setattr(f"protonet.network.{name}", index)
        blocks.clear()
        torch.testing.assert_close(network(x), full)
        assert max(blocks) == expected
    assert network(x[:0]).shape == (0, 5)


def make_scaled_problem(scale: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features (90, 6) of 3 classes, of a scale, or of an offset, that half precision cannot hold."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    x = 3 * torch.randn(3, 6, generator=generator)[y] + torch.randn(90, 6, generator=generator)
    if scale == "offset":
        return x + 1e6, y
    factors = {"huge": [1e20], "mixed": [1e5, 1.0, 1e-3, 1e5, 1.0, 1e3]}
    return x * torch.tensor(factors[scale]), y


@pytest.mark.parametrize("scale", ["huge", "mixed", "offset"])
def test_reduced_precision_changes_probabilities_by_rounding_alone(scale: str) -> None:
    x, y = make_scaled_problem(scale)
    network = solve((x, y))
    with torch.no_grad():
        expected = network(x).softmax(dim=1)
        result = {}
        for name in ("half", "bfloat16", "double"):
            converted = getattr(copy.deepcopy(network), name)()
            result[name] = converted(x).softmax(dim=1).float()
            converted.set_prototypes(x, y)
            result[f"{name}, prototypes anew"] = converted(x).softmax(dim=1).float()
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype=dtype):
                result[f"autocast {dtype}"] = network(x).softmax(dim=1).float()
    for name, probabilities in result.items():
        torch.testing.assert_close(probabilities, expected, atol=0.03, rtol=0, msg=name)


def test_half_precision_counts_every_sample() -> None:
    x = torch.tensor([[1.0, 0.0]]).repeat(6000, 1)
    network = PrototypeNetwork(nn.Identity(), embedding_dim=2, num_classes=1).half()
    network.set_prototypes(x, torch.zeros(6000, dtype=torch.int64))
    network.add_samples(x[:1], torch.zeros(1, dtype=torch.int64))
    assert network.sums.tolist() == [[6001.0, 0.0]]
    assert network(x[:1]).dtype == torch.float16


def test_learned_views_follow_the_precision() -> None:
    network = make_network().half()
    assert {parameter.dtype for parameter in network.encoder.parameters()} == {torch.float16}
    assert bool(network(blobs(0)[0]).isfinite().all())


@pytest.mark.parametrize("add", [False, True])
def test_a_class_whose_rows_cancel_is_never_predicted(add: bool) -> None:
    direction = F.normalize(torch.randn(6, generator=torch.Generator().manual_seed(0)), dim=0)
    others = F.normalize(direction.roll(1) + torch.eye(6)[:2], dim=1)
    x, y = torch.stack([direction, -direction, *others]), torch.tensor([0, 0, 1, 2])
    network = PrototypeNetwork(nn.Identity(), embedding_dim=6, num_classes=4)
    if add:
        network.set_prototypes(x[1:], y[1:])
        network.add_samples(x[:1], y[:1])
    else:
        network.set_prototypes(x, y)
    assert network.has_zero_sum.tolist() == [True, False, False, False]
    queries = torch.cat([x, -x, torch.randn(50, 6, generator=torch.Generator().manual_seed(1))])
    logits = network(queries)
    assert set(logits.argmax(dim=1).tolist()) == {1, 2}
    assert bool((logits[:, :3] > -100).all())  # a finite log-loss for rows of the class
    network.add_samples(direction[None], torch.tensor([0]))
    assert not network.has_zero_sum.any()
    torch.testing.assert_close(network.prototypes[0], direction)


def test_the_parts_of_a_class_mean_that_cancel_are_zero() -> None:
    encoder = make_encoder([0.5, 0.5, 0.0, 0.0])
    embedding = encoder(blobs(0)[0][:1])
    first = torch.zeros_like(embedding)
    first[:, : encoder.sizes[0]] = embedding[:, : encoder.sizes[0]]
    remaining = embedding - first
    prototype = encoder.normalize((first + 1e-8 * remaining) / 2)
    torch.testing.assert_close(prototype, first)


def test_offsets_are_added_to_the_logits_and_follow_their_classes() -> None:
    network, (x, _) = make_network(num_classes=5), blobs(0)
    before = network(x).detach()
    offsets = torch.tensor([0.5, -0.5, 0.25, 0.0, -0.25])
    network.set_offsets(offsets)
    seen = network.has_samples
    assert torch.allclose(network(x)[:, seen], (before + offsets)[:, seen])
    loaded = make_network(1, num_classes=5)
    loaded.load_state_dict(network.state_dict())
    assert torch.equal(loaded.offsets, offsets)
    network.add_class(x[:2])
    assert torch.equal(network.offsets, torch.cat([offsets, torch.zeros(1)]))
    network.arrange_classes(torch.tensor([4, -1, 0]))
    assert torch.equal(network.offsets, torch.tensor([-0.25, 0.0, 0.5]))


SCALINGS = ("raw", "centred", "whitened")


def make_encoder(weights: list[float], *, members: int = 2, seed: int = 0) -> Encoder:
    """Build an encoder of three linear views and a stack of MLPs; views of weight 0 are left out."""
    rows = TrainingRows(*blobs(seed), 5)
    linear = [LinearSpec(scaling).fit(rows) for scaling in SCALINGS]
    learned = ResidualMLPs(members, 8, 3, 12, torch.Generator().manual_seed(seed))
    torch.nn.init.normal_(learned.last, generator=torch.Generator().manual_seed(seed))
    views: list[View] = [*linear, MLPView.from_mlps(learned, linear[0].source)]
    used = [view for view, weight in zip(views, weights, strict=True) if weight]
    return Encoder(used, split_weights(used, [weight for weight in weights if weight]), origin=torch.zeros(8))


@pytest.mark.parametrize(
    ("weights", "fractions"),
    [
        ([0.2, 0.3, 0.1, 0.4], [0.2, 0.3, 0.1, 0.2, 0.2]),
        ([0.0, 0.5, 0.0, 0.5], [0.5, 0.25, 0.25]),
        ([0.0, 0.0, 0.0, 4.0], [0.75, 0.25]),  # a file may give the parts of a view unequal shares
        ([2.0, 0.0, 2.0, 0.0], [0.5, 0.5]),
    ],
)
def test_the_cosine_is_the_weighted_sum_of_the_parts_cosines(weights: list[float], fractions: list[float]) -> None:
    encoder = make_encoder(weights)
    encoder.weights.copy_(torch.tensor(fractions))
    x, _ = blobs(4)
    parts: list[torch.Tensor] = []
    for view in encoder.iterate_views():
        assert view.source is not None
        z = view.source(x)
        parts += list(view.mlps(z)) if isinstance(view, MLPView) else [view(z)]
    cosines = torch.stack([F.cosine_similarity(v[:, None], v[None, :], dim=2) for v in parts])
    embedding = encoder(x)
    assert embedding.shape[1] == encoder.embedding_dim
    torch.testing.assert_close(embedding @ embedding.T, torch.tensordot(torch.tensor(fractions), cosines, dims=1))


@pytest.mark.parametrize("members", [1, 2, 3])
def test_the_weight_of_a_view_is_divided_evenly_over_its_parts(members: int) -> None:
    weights = make_encoder([1.0, 0.0, 2.0, 3.0], members=members).weights
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, *[3 / members] * members]) / 6)
    assert weights.dtype == torch.float32


def test_normalize_scales_each_part_to_its_weight() -> None:
    encoder = make_encoder([0.2, 0.3, 0.1, 0.4])
    embedding = encoder(blobs(5)[0])
    torch.testing.assert_close(encoder.normalize(embedding * 3), embedding)
    mean = encoder.normalize(embedding.mean(dim=0, keepdim=True))
    norms = torch.stack([piece.norm() for piece in mean.split([8, 8, 9, 12, 12], dim=1)])
    torch.testing.assert_close(norms.square(), torch.tensor([0.2, 0.3, 0.1, 0.2, 0.2]))


def test_the_features_are_divided_by_their_scale() -> None:
    encoder, (x, _) = make_encoder([1.0, 1, 1, 1]), blobs(5)
    expected = encoder(x)
    encoder.scale.fill_(4.0)
    assert torch.equal(encoder(4 * x), expected)


def test_a_source_of_several_views_is_evaluated_and_listed_once() -> None:
    encoder, calls = make_encoder([1.0, 1, 1, 1]), []
    sources = encoder.list_input_maps()
    assert len(sources) == 3
    sources[0].register_forward_hook(lambda *_: calls.append(1))
    encoder(blobs(0)[0])
    assert len(calls) == 1


def test_a_caller_can_have_rows_checked() -> None:
    network = solve([blobs(0)])
    x = blobs(0)[0].clone()
    assert torch.equal(network(x, check=True), network(x))
    x[3, 2] = math.nan
    x[4, 0] = -math.inf
    assert network(x).argmax(dim=1)[:3].tolist() == network(x[:3]).argmax(dim=1).tolist()
    with pytest.raises(InputError, match=r"^`x` must be finite; got NaN or infinity in 2 of 30 rows"):
        network(x, check=True)
