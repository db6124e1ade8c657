"""Methods of a meta-trained encoder equal plain loops of torch's own optimizers; and properties of all of them."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.episodes.methods import METHODS
from protonet.episodes.methods.encoders import anil, feat, finetune, maml
from protonet.episodes.names import HEAD_INITS
from protonet.episodes.networks.augmentation import ROW_NOISE_STD, draw_affine_maps, warp_images
from protonet.episodes.networks.backbones import LinearHead, SetTransformer
from protonet.episodes.samplers.batch import Episodes
from tests.episodes.cases import TRAINED, core_rows, cosines, make_trained, make_trained_episodes, means_of, trained_of

STEPS, RATE = 4, 0.02
RENAMED = torch.tensor([2, 0, 3, 1])


def make_case(name: str, *, backbone: str = "mlp", head: str = "zero", **made: Any) -> tuple[Episodes, Tensor]:
    """Make episodes with an encoder that a method can use; return them and the labels of the queries."""
    dim = {"mlp": 6, "conv": 64, "conv4": 256}[backbone]
    trained = make_trained(TRAINED[name] or "prototypes", backbone=backbone, dim=dim, head=head)
    return make_trained_episodes(trained, **made)


def is_near(logits: Tensor, slow: Callable[[int], Tensor], *, atol: float, rtol: float = 1e-4) -> bool:
    """Return whether the logits of three episodes equal those that ``slow`` computes of an episode's index."""
    return torch.allclose(logits, torch.stack([slow(index) for index in range(3)]), atol=atol, rtol=rtol)


def test_feat_equals_a_slow_loop() -> None:
    episodes, labels = make_case("feat")
    head, logits = trained_of(episodes).head, feat(episodes)
    assert isinstance(head, SetTransformer)

    def slow(index: int) -> Tensor:
        means, adapted = means_of(episodes.support[index], episodes.support_labels[index]), []
        for mean in means:
            scores = torch.stack([head.query(mean) @ head.key(other) / 8**0.5 for other in means])
            moved = sum(p * head.value(other) for p, other in zip(scores.softmax(dim=0), means, strict=True))
            adapted.append(F.layer_norm(mean + head.output(moved), (8,)))
        return cosines(episodes.query[index], torch.stack(adapted)) / 0.1

    assert is_near(logits, slow, atol=1e-4)
    assert float((logits.argmax(dim=2) == labels).double().mean()) > 0.25
    torch.testing.assert_close(feat(episodes, temperature=1.0), logits / 10)


def descend(network: nn.Module, rows: Tensor, labels: Tensor, steps: int) -> nn.Module:
    """Train a network by torch's own optimizer."""
    optimizer = torch.optim.SGD(network.requires_grad_(True).parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(network(rows), labels).backward()
        optimizer.step()
    return network


@pytest.mark.parametrize(
    ("method", "steps", "head"),
    [(maml, None, "classes"), (maml, None, "zero"), (maml, 0, "classes"), (anil, None, "classes")],
)
def test_maml_and_anil_equal_slow_loops(method: Callable[..., Tensor], steps: int | None, head: str) -> None:
    episodes, labels = make_case(method.__name__, head=head)
    trained = trained_of(episodes)
    with torch.no_grad():
        logits = method(episodes, steps=steps)

    def slow(index: int) -> Tensor:
        assert isinstance(trained.head, LinearHead)
        layer = nn.utils.skip_init(nn.Linear, trained.head.weight.shape[1], 4)
        layer.load_state_dict(trained.head.make_initial_weights(4))
        rows, encoder = trained.gather_inputs(), copy.deepcopy(trained.encoder)
        if method is anil:
            rows, encoder = (episodes.support, episodes.query), nn.Identity()
        network: nn.Module = nn.Sequential(encoder, layer)
        network = descend(network, rows[0][index], episodes.support_labels[index], 3 if steps is None else steps)
        result: Tensor = network(rows[1][index]).detach()
        return result

    assert is_near(logits, slow, atol=1e-5)
    assert steps is not None or float((logits.argmax(dim=2) == labels).double().mean()) > 0.6
    torch.testing.assert_close(method(episodes, steps=3, rate=0.5), method(episodes))  # as in training
    assert not torch.allclose(method(episodes, rate=0.1), method(episodes), atol=1e-3)
    assert not torch.allclose(method(episodes, steps=1), method(episodes, steps=2), atol=1e-3)


@pytest.mark.parametrize("head", HEAD_INITS)
def test_one_step_of_maml_equals_anils_if_the_layer_begins_at_zero(head: str) -> None:
    episodes, _ = make_case("maml", head=head)
    trained = trained_of(episodes)
    trained = trained._replace(plan=replace(trained.plan, objective="anil"))
    logits = anil(replace(episodes, trained=trained), steps=1)
    assert torch.allclose(maml(episodes, steps=1), logits, atol=1e-5) == (head == "zero")


@pytest.mark.parametrize(
    ("backbone", "head", "augment"),
    [("mlp", "prototypes", True), ("mlp", "linear", True), ("mlp", "prototypes", False), ("conv", "prototypes", True)],
)
def test_fine_tuning_equals_a_slow_loop(backbone: str, head: str, augment: bool) -> None:
    episodes, _ = make_case("finetune", backbone=backbone)
    trained = trained_of(episodes)
    with torch.no_grad():
        logits = finetune(episodes, head=head, steps=STEPS, learning_rate=RATE, augment=augment)

    def slow(index: int) -> Tensor:
        support, query = (rows[index] for rows in trained.gather_inputs())
        labels, encoder = episodes.support_labels[index], copy.deepcopy(trained.encoder).requires_grad_(True)
        layer = nn.utils.skip_init(nn.Linear, episodes.support.shape[2], 4)
        layer.load_state_dict({"weight": torch.zeros(4, layer.in_features), "bias": torch.zeros(4)})

        def classify(rows: Tensor) -> Tensor:
            linear = head == "linear"
            logits: Tensor = (
                layer(encoder(rows)) if linear else cosines(encoder(rows), means_of(encoder(support), labels))
            )
            return logits if linear else logits / 0.1

        optimizer = torch.optim.Adam([*encoder.parameters(), *layer.parameters()], lr=RATE)
        generator = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            changed = support
            if augment and backbone == "mlp":
                noise = torch.randn(support.shape, generator=generator)
                changed = support + ROW_NOISE_STD * support.std(dim=0, correction=0) * noise
            elif augment:
                changed = warp_images(support, draw_affine_maps(len(support), generator))
            optimizer.zero_grad()
            F.cross_entropy(classify(changed), labels).backward()
            optimizer.step()
        return classify(query).detach()

    assert is_near(logits, slow, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(
    ("name", "backbone", "settings"),
    [
        ("feat", "mlp", {}),
        ("anil", "mlp", {}),
        ("maml", "mlp", {}),
        ("maml", "conv4", {}),
        ("finetune", "mlp", {"steps": 5}),
        ("finetune", "conv4", {"head": "linear", "steps": 2}),
    ],
)
def test_every_query_and_every_episode_is_alone_and_no_weight_is_changed(
    name: str, backbone: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes, _ = make_case(name, backbone=backbone, n_shot=1 if backbone == "conv4" else 2)
    method, trained = partial(METHODS[name].function, **settings), trained_of(episodes)
    weights = copy.deepcopy(trained.encoder.state_dict())
    tolerance: dict[str, Any] = {"atol": 1e-3 if settings else 1e-4, "rtol": 1e-3}
    logits = method(episodes)
    torch.testing.assert_close(method(episodes.select_queries(slice(3, 8))), logits[:, 3:8], **tolerance)
    one = slice(1, 2)
    assert trained.support_ids is not None
    assert trained.query_ids is not None
    support, labels, query = (rows[one] for rows in core_rows(episodes))
    alone = Episodes(support=support, support_labels=labels, query=query, n_way=4)
    ids = {name: getattr(trained, name)[one] for name in ("support_ids", "query_ids")}
    alone = replace(alone, trained=trained._replace(**ids))
    torch.testing.assert_close(method(alone)[0], logits[1], **tolerance)
    module = sys.modules[METHODS[name].function.__module__]
    for constant in [name for name in vars(module) if name.endswith("_PER_BATCH")]:  # an episode at a time
        monkeypatch.setattr(module, constant, 1)
    torch.testing.assert_close(method(episodes), logits, **tolerance)
    assert all(torch.equal(weights[key], weight) for key, weight in trained.encoder.state_dict().items())
    assert all(not layer.leading for layer in trained.encoder.modules() if hasattr(layer, "leading"))


@pytest.mark.parametrize(
    ("name", "head"), [("feat", "zero"), ("finetune", "zero"), *itertools.product(("maml", "anil"), HEAD_INITS)]
)
def test_names_and_numbers_of_classes_matter_if_each_has_weights(name: str, head: str) -> None:
    episodes, _ = make_case(name, head=head)
    changed = METHODS[name](replace(episodes, support_labels=RENAMED[episodes.support_labels]))[:, :, RENAMED]
    tolerance = 1e-3 if name == "finetune" else 1e-5
    assert torch.allclose(changed, METHODS[name](episodes), atol=tolerance, rtol=1e-4) == (head == "zero")
    fewer = replace(episodes, support_labels=episodes.support_labels % 3, n_way=3)
    if head == "zero":
        assert METHODS[name](fewer).shape == (3, 12, 3)
    else:
        message = r"^`episodes` must have 4 classes, as those .*; got 3\. Pass `way` 4, or train with `head`"
        with pytest.raises(ValueError, match=message):
            METHODS[name](fewer)


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_encoders_of_something_else(name: str) -> None:
    episodes, _ = make_trained_episodes(make_trained("anil" if name == "feat" else "feat"))
    objective = TRAINED[name]
    constraint = "come with an encoder" + ("" if objective is None else f" of the objective {objective}")
    if objective is not None:
        message = rf"{constraint}; got one of \w+\. Pass `encoder`, a file of train with the objective {name}\.$"
        with pytest.raises(ValueError, match=f"^`episodes` must {message}"):
            METHODS[name](episodes)
    with pytest.raises(ValueError, match=rf"^`episodes` must {constraint}; got none\. Pass `enc"):
        METHODS[name](replace(episodes, trained=None))
