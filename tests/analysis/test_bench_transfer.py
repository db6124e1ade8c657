"""The bench's fine-tuning: what was pretrained on what, and what is new."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from analysis.optimizer_bench.workload import initial_weights
from analysis.optimizer_bench.workloads.images import SIDE, load_ascii, load_latin
from analysis.optimizer_bench.workloads.transfer import (
    ADAPTER_ROWS,
    ADAPTER_VALIDATION,
    GRAIN,
    INK,
    WIDTH,
    Adapter,
    build_adapter,
    build_transfer,
    halve,
    load_body,
    load_shifted,
    make_cnn,
    make_mlp,
    shift,
)


def test_pretraining_and_transfer_share_no_character() -> None:
    data = load_latin()
    old, new = halve(data)
    assert not set(data.y[old].tolist()) & set(data.y[new].tolist())
    assert sorted([*old.tolist(), *new.tolist()]) == list(range(len(data.y)))


def test_a_body_is_the_same_for_all_seeds_and_a_head_is_not() -> None:
    first, second = (build_transfer(seed).model.state_dict() for seed in (0, 1))
    for name, weight in load_body().items():
        assert torch.equal(first[f"0.{name}"], weight)
        assert torch.equal(second[f"0.{name}"], weight)
    assert not torch.equal(first["1.weight"], second["1.weight"])


def test_a_body_helps() -> None:
    """The mean image of each character tells more characters by the body's features than by a random body's."""
    data = load_latin()
    rows = halve(data)[1]
    with initial_weights(0):
        random, trained = (make_cnn(1)[0] for _ in range(2))
    trained.load_state_dict(load_body())
    fit, held_out = rows.chunk(2)
    shares = []
    for body in (random, trained):
        with torch.no_grad():
            features = F.normalize(body(data.x), dim=1)
        means = torch.zeros(data.num_classes, features.shape[1]).index_add(0, data.y[fit], features[fit])
        found = (features[held_out] @ F.normalize(means, dim=1).T).argmax(1)
        shares.append((found == data.y[held_out]).float().mean().item())
    assert shares[1] > shares[0] + 0.1


def test_training_leaves_what_was_pretrained_as_it_was() -> None:
    for build, weights in ((build_transfer, load_body()), (build_adapter, load_shifted()[2])):
        before = {name: weight.clone() for name, weight in weights.items()}
        workload = build(0)
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
        workload.train_loss().backward()
        optimizer.step()
        assert all(torch.equal(weight, before[name]) for name, weight in weights.items())


def test_an_adapter_starts_as_next_to_nothing() -> None:
    with initial_weights(0):
        adapter, x = Adapter(), torch.randn(20, WIDTH)
    torch.testing.assert_close(adapter(x), x, atol=0.02, rtol=0)
    assert not torch.equal(adapter(x), x)


def test_old_weights_tell_old_images_better_than_shifted_ones() -> None:
    data = load_ascii()
    images, classes, weights = load_shifted()
    assert len(images) > ADAPTER_ROWS + ADAPTER_VALIDATION
    model = make_mlp(data.num_classes)
    model.load_state_dict(weights)
    held_out = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[-ADAPTER_VALIDATION:]
    assert torch.equal(data.y[held_out], classes[-ADAPTER_VALIDATION:])
    with torch.no_grad():
        old, new = (
            F.cross_entropy(model(x), data.y[held_out]) for x in (data.x[held_out], images[-ADAPTER_VALIDATION:])
        )
    assert old < new - 0.3


def test_a_shift_slants_about_the_centre() -> None:
    upright = torch.zeros(SIDE, SIDE)
    upright[:, SIDE // 2 - 1 : SIDE // 2 + 1] = 1
    noise = shift(torch.zeros(1, SIDE * SIDE))
    image = (shift(upright.view(1, -1)) - noise).view(SIDE, SIDE)
    torch.testing.assert_close(image.max(), torch.tensor(INK))
    torch.testing.assert_close(image.sum(1)[4:-4], torch.full((SIDE - 8,), 2 * INK))  # no ink is lost
    columns = (image * torch.arange(SIDE)).sum(1) / image.sum(1)  # of the stroke, row by row
    slopes = columns[4:-4].diff()
    torch.testing.assert_close(slopes, slopes.mean().expand_as(slopes), atol=1e-3, rtol=0)
    assert slopes.mean().abs() > 0.2
    torch.testing.assert_close(noise.std().item(), GRAIN, atol=0.02, rtol=0)
