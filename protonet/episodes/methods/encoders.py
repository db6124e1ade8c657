"""Methods of a meta-trained encoder: FEAT, MAML, ANIL, and fine-tuning of the whole encoder."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from protonet.episodes.methods.common import cosines, minimize_by_adam, one_hot, support_means
from protonet.episodes.methods.keywords import Count, NonNegative, Positive
from protonet.episodes.networks.augmentation import ROW_NOISE_STD, draw_affine_maps, infer_image_shape, warp_images
from protonet.episodes.networks.backbones import MIN_IMAGE_SIDES, LinearHead, use_support_statistics
from protonet.episodes.samplers.batch import Episodes, TrainedEncoder
from protonet.errors import raise_input_error

WeightsByName = Mapping[str, Tensor]  #: The weights of a network by name.
#: The values of the setting ``head`` of `finetune`.
FINETUNE_HEADS = ("prototypes", "linear")
#: Maximum numbers of features of rows, and of adapted weights of networks, in memory at a time.
MAML_FEATURES_PER_BATCH, MAML_WEIGHTS_PER_BATCH = 2**21, 2**22
FINETUNE_FEATURES_PER_BATCH, FINETUNE_WEIGHTS_PER_BATCH = 2**20, 2**22


def get_trained_encoder(episodes: Episodes, objective: str | None = None) -> TrainedEncoder:
    """Get the meta-trained encoder of episodes.

    Raises an InputError if there is none, or if it was trained with another objective or for another number of classes.
    """
    trained = episodes.trained
    constraint = "come with an encoder" if objective is None else f"come with an encoder of the objective {objective}"
    remedy = f"Pass `encoder`, a file of train{'' if objective is None else f' with the objective {objective}'}."
    if trained is None:
        raise_input_error("episodes", constraint, "none", remedy)
    if objective not in (None, trained.plan.objective):
        raise_input_error("episodes", constraint, f"one of {trained.plan.objective}", remedy)
    n_way = getattr(trained.head, "n_way", None)
    if objective is not None and n_way not in (None, episodes.n_way):
        constraint = f"have {n_way} classes, as those that the encoder learned from"
        remedy = f"Pass `way` {n_way}, or train with `head` zero, for any number."
        raise_input_error("episodes", constraint, episodes.n_way, remedy)
    return trained


def feat(episodes: Episodes, *, temperature: Positive = 0.1) -> Tensor:
    """Classify by the cosine to class means that a transformer has adapted to each other.

    Encoder and transformer were trained by ``train --objective feat``.

    Args:
        temperature: > 0, divides the cosines. The default is the value in training.

    Source: Ye, Hu, Zhan and Sha, "Few-shot learning via embedding adaptation with set-to-set functions" (2020), sec.
        4.1. https://arxiv.org/abs/1812.03664
    """
    head = get_trained_encoder(episodes, "feat").head
    weight = next(head.parameters())
    prototypes = head(support_means(episodes).to(weight)).to(episodes.query)
    return cosines(episodes.query, prototypes) / temperature


def maml(episodes: Episodes, *, steps: Count | None = None, rate: Positive | None = None) -> Tensor:
    """Classify by the encoder and a linear layer after gradient steps on the support's cross-entropy.

    The encoder was trained by ``train --objective maml`` with the same number of classes. In the linear layer, each
    class has its own initial weights, so that the order of the classes matters a little (Ye and Chao 2022). An encoder
    from ``--head zero`` is for any number of classes, in any order. Its first step changes the linear layer alone, as
    in `anil`. Batch normalisation uses statistics of the support (Bronskill et al. 2020). In the authors' code it uses
    statistics of the queries, so that a prediction depends on the other queries. The method uses the encoder's inputs
    instead of the embeddings.

    Args:
        steps: Gradient steps, >= 0; None for as many as in training. The paper trains with 5, and tests with 10.
        rate: The learning rate of the steps, > 0; None for that of training.

    Source: Finn, Abbeel and Levine, "Model-agnostic meta-learning for fast adaptation of deep networks" (2017),
        algorithm 2. https://arxiv.org/abs/1703.03400
    """
    trained = get_trained_encoder(episodes, "maml")
    return _classify_adapted(episodes, trained, trained.encoder, *trained.gather_inputs(), steps=steps, rate=rate)


def anil(episodes: Episodes, *, steps: Count | None = None, rate: Positive | None = None) -> Tensor:
    """Classify by a linear layer on the embeddings after gradient steps on the support's cross-entropy.

    The encoder was trained by ``train --objective anil``. The initial weights of the linear layer are as in `maml`.

    Args:
        steps: Gradient steps, >= 0; None for as many as in training.
        rate: The learning rate of the steps, > 0; None for that of training.

    Source: Raghu, Raghu, Bengio and Vinyals, "Rapid learning or feature reuse? Towards understanding the effectiveness
        of MAML" (2020), sec. 4.1. https://arxiv.org/abs/1909.09157
    """
    trained, rows = get_trained_encoder(episodes, "anil"), (episodes.support, episodes.query)
    return _classify_adapted(episodes, trained, nn.Identity(), *rows, steps=steps, rate=rate)


def _classify_adapted(
    episodes: Episodes,
    trained: TrainedEncoder,
    encoder: nn.Module,
    support: Tensor,
    query: Tensor,
    *,
    steps: int | None,
    rate: float | None,
) -> Tensor:
    """Compute logits by `classify_adapted` with the trained head, by default with the steps and rate of training."""
    assert isinstance(trained.head, LinearHead)
    steps = trained.plan.inner_steps if steps is None else steps
    rate = trained.plan.inner_rate if rate is None else rate
    device = trained.head.weight.device
    rows = (tensor.to(device) for tensor in (support, episodes.support_labels, query))
    return classify_adapted(encoder, trained.head, *rows, n_way=episodes.n_way, steps=steps, rate=rate)


def classify_adapted(
    encoder: nn.Module,
    head: LinearHead,
    support: Tensor,
    labels: Tensor,
    query: Tensor,
    *,
    n_way: int,
    steps: int,
    rate: float,
    first_order: bool = False,
) -> Tensor:
    """Classify the queries of each episode by encoder and head after gradient steps on its support.

    If the encoder is `torch.nn.Identity`, only the head is adapted. The logits are differentiable with respect to the
    rows and to the initial weights.

    Args:
        encoder: The initial encoder.
        head: The initial linear layer.
        support: (episodes, n_support, dim).
        labels: (episodes, n_support) int64.
        query: (episodes, n_queries, dim).
        n_way: Classes per episode.
        steps: The number of gradient steps, >= 0.
        rate: The learning rate of these steps, > 0.
        first_order: Whether the gradients of the steps count as constants when the result is differentiated.

    Returns:
        Logits (episodes, n_queries, n_way).

    Source: Finn, Abbeel and Levine (2017), eq. 1, and sec. 5.2 for the first order.
    """
    network = nn.Sequential(OrderedDict(encoder=encoder, head=head))
    weights: dict[str, Tensor] = {f"encoder.{name}": weight for name, weight in encoder.named_parameters()}
    weights |= {f"head.{name}": weight.to(support.dtype) for name, weight in head.make_initial_weights(n_way).items()}

    def classify(support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        def loss(weights: WeightsByName) -> Tensor:
            return F.cross_entropy(functional_call(network, dict(weights), support), labels)

        adapted: WeightsByName = weights
        for _ in range(steps):
            gradients = grad(loss)(adapted)
            if first_order:
                gradients = {name: gradient.detach() for name, gradient in gradients.items()}
            adapted = {name: weight - rate * gradients[name] for name, weight in adapted.items()}
        rows = torch.cat([support, query]) if has_statistics else query
        logits: Tensor = functional_call(network, dict(adapted), rows)
        return logits[-len(query) :]

    n_weights = sum(weight.numel() for weight in weights.values())
    n_features = support[0].numel() + query[0].numel()
    max_episodes = max(1, min(MAML_FEATURES_PER_BATCH // n_features, MAML_WEIGHTS_PER_BATCH // n_weights))
    with use_support_statistics(encoder, support.shape[1]) as has_statistics:
        logits: Tensor = vmap(classify, randomness="different", chunk_size=max_episodes)(support, labels, query)
    return logits


def finetune(
    episodes: Episodes,
    *,
    head: str = "prototypes",
    steps: Count = 50,
    learning_rate: NonNegative = 1e-3,
    temperature: Positive = 0.1,
    augment: bool = True,
    seed: Count = 0,
) -> Tensor:
    """Classify by the encoder after steps of Adam on the support's cross-entropy, separately for each episode.

    With the head ``prototypes``, each step classifies an augmented copy of the support by the cosine to the class means
    of the original support. Batch normalisation keeps the statistics that are stored in the encoder. The method uses
    the encoder's inputs instead of the embeddings.

    Args:
        head: ``prototypes`` classifies by class means, as the paper (P>M>F) does. ``linear`` is a linear layer on the
            embeddings with zeros as initial weights, as in transfer learning.
        steps: Steps of Adam, >= 0. The paper uses 50.
        learning_rate: The learning rate of Adam, >= 0. The paper chooses it on validation classes among 0, 1e-4, 1e-3
            and 1e-2; ``tune`` does so here.
        temperature: > 0, divides the cosines.
        augment: Whether to augment the support in each step, as in meta-training: images are moved and turned (and
            flipped, if they are RGB), other rows get noise.
        seed: The seed of the augmentation, >= 0, which is the same in every episode.

    Source: Hu, Li, Stühmer, Kim and Hospedales, "Pushing the limits of simple pipelines for few-shot learning" (2022),
        sec. 3.3, https://arxiv.org/abs/2204.07305; linear: Guo et al., "A broader study of cross-domain few-shot
        learning" (2020), sec. 4.2, with SGD. https://arxiv.org/abs/1912.07200
    """
    trained = get_trained_encoder(episodes)
    if head not in FINETUNE_HEADS:
        raise_input_error("finetune:head", f"be one of {', '.join(FINETUNE_HEADS)}", repr(head), "Pick one of them.")
    support, query = trained.gather_inputs()
    labels, n_way = episodes.support_labels.to(support.device), episodes.n_way
    encoder, n_support, dim = trained.encoder, *support.shape[1:]
    weights: dict[str, Tensor] = dict(encoder.named_parameters())
    if head == "linear":
        embedding_dim = episodes.query.shape[2]
        weights["head"] = support.new_zeros(n_way, embedding_dim + 1)
    sizes = [weight.numel() for weight in weights.values()]
    start = torch.cat([weight.flatten() for weight in weights.values()])  # (weights,)
    is_image, shape = trained.plan.backbone in MIN_IMAGE_SIDES, infer_image_shape(dim)

    def classify(vector: Tensor, support: Tensor, hot: Tensor, rows: Tensor) -> Tensor:
        """Map one episode's weights (weights,), support (n_support, dim) and rows (n, dim) to logits (n, n_way)."""
        parts = zip(weights.items(), vector.split(sizes), strict=True)
        weights_of_episode = {name: part.view(weight.shape) for (name, weight), part in parts}
        if "head" in weights_of_episode:
            layer = weights_of_episode.pop("head")
            return F.linear(functional_call(encoder, weights_of_episode, rows), layer[:, :-1], layer[:, -1])
        embedded: Tensor = functional_call(encoder, weights_of_episode, torch.cat([support, rows]))
        means = (hot / hot.sum(dim=0)).T @ embedded[:n_support]
        return F.normalize(embedded[n_support:], dim=1) @ F.normalize(means, dim=1).T / temperature

    def loss(vector: Tensor, support: Tensor, hot: Tensor, changed: Tensor) -> Tensor:
        return F.cross_entropy(classify(vector, support, hot, changed), hot)

    def augment_support(support: Tensor, generator: torch.Generator) -> Tensor:
        if not augment:
            return support
        if is_image:
            maps = draw_affine_maps(n_support, generator, flip=shape is not None and shape[0] == 3).to(support.device)
            changed: Tensor = warp_images(support.flatten(0, 1), maps.repeat(len(support), 1, 1))
            return changed.reshape(support.shape)
        noise = torch.randn(n_support, dim, generator=generator).to(support.device)
        return support + ROW_NOISE_STD * support.std(dim=1, correction=0, keepdim=True) * noise

    def finetune_and_classify(support: Tensor, hot: Tensor, query: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        tuned = minimize_by_adam(
            start.repeat(len(support), 1),
            lambda vectors: vmap(grad(loss))(vectors, support, hot, augment_support(support, generator)),
            learning_rate=learning_rate,
            steps=steps,
        )
        logits: Tensor = vmap(classify)(tuned, support, hot, query)
        return logits

    hot = one_hot(labels, n_way, torch.float32)
    max_episodes = min(FINETUNE_FEATURES_PER_BATCH // (2 * n_support * dim), FINETUNE_WEIGHTS_PER_BATCH // len(start))
    blocks = (tensor.split(max(1, max_episodes)) for tensor in (support, hot, query))
    return torch.cat([finetune_and_classify(*block) for block in zip(*blocks, strict=True)])
