"""Fine-tuning the whole encoder on each episode's support, with prototypes or a linear layer as its head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from protonet.episodes.methods.common import adam, get_trained, one_hot
from protonet.episodes.methods.keywords import Count, NonNegative, Positive
from protonet.episodes.networks.augmentation import AUGMENTATION, draw_maps, infer_image_shape, warp_images
from protonet.episodes.networks.backbones import IMAGES
from protonet.episodes.samplers.batch import Episodes
from protonet.errors import raise_input_error

FINETUNE_HEADS = ("prototypes", "linear")
#: Features of rows, and weights of encoders, that are worked on at a time: bounds the memory.
FINETUNE_FEATURES_PER_BATCH, FINETUNE_WEIGHTS_PER_BATCH = 2**20, 2**22


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
    """Classify by the encoder after steps of Adam on the support's cross-entropy, from the same weights every time.

    With prototypes, each step classifies a changed copy of the support by the cosine to the class means of the support
    itself. Batch normalisation keeps its measured statistics.

    Args:
        episodes: Those of an encoder, whose rows before it are used.
        head: prototypes, as in P>M>F; linear, a layer on the embeddings that begins at zero, as in transfer learning.
        steps: Adam's, >= 0. P>M>F: 50.
        learning_rate: Adam's, >= 0. P>M>F chooses it on validation classes among 0, 1e-4, 1e-3 and 1e-2: use ``tune``.
        temperature: > 0, divides the cosines.
        augment: Change the support at random in each step, as in meta-training: images are moved and turned (and
            flipped, if they are RGB), others get noise. Otherwise the steps see the support as it is.
        seed: Of these changes, >= 0, which are the same in every episode.

    Returns:
        Logits (episodes, n_queries, n_way) float32.

    Raises:
        InputError: There is no encoder, or no such head.

    Source: Hu, Li, Stühmer, Kim and Hospedales, "Pushing the limits of simple pipelines for few-shot learning" (2022),
        sec. 3.3, https://arxiv.org/abs/2204.07305; linear: Guo et al., "A broader study of cross-domain few-shot
        learning" (2020), sec. 4.2, with SGD. https://arxiv.org/abs/1912.07200
    """
    trained = get_trained(episodes, "finetune")
    if head not in FINETUNE_HEADS:
        raise_input_error("head", f"be one of {', '.join(FINETUNE_HEADS)}", repr(head), "Pick one of them.")
    support, query = trained.gather()
    labels, n_way = episodes.support_labels.to(support.device), episodes.n_way
    encoder, n_support, dim = trained.encoder, *support.shape[1:]
    weights: dict[str, Tensor] = dict(encoder.named_parameters())
    if head == "linear":
        embedding_dim = episodes.query.shape[2]
        weights["head"] = support.new_zeros(n_way, embedding_dim + 1)
    sizes = [weight.numel() for weight in weights.values()]
    start = torch.cat([weight.flatten() for weight in weights.values()])  # (weights,)
    is_image, shape = trained.plan.backbone in IMAGES, infer_image_shape(dim)

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

    def change(support: Tensor, generator: torch.Generator) -> Tensor:
        if not augment:
            return support
        if is_image:
            maps = draw_maps(n_support, generator, flip=shape is not None and shape[0] == 3).to(support.device)
            changed: Tensor = warp_images(support.flatten(0, 1), maps.repeat(len(support), 1, 1))
            return changed.reshape(support.shape)
        noise = torch.randn(n_support, dim, generator=generator).to(support.device)
        return support + AUGMENTATION.noise * support.std(dim=1, correction=0, keepdim=True) * noise

    def tune(support: Tensor, hot: Tensor, query: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        tuned = adam(
            start.repeat(len(support), 1),
            lambda vectors: vmap(grad(loss))(vectors, support, hot, change(support, generator)),
            learning_rate=learning_rate,
            steps=steps,
        )
        logits: Tensor = vmap(classify)(tuned, support, hot, query)
        return logits

    hot = one_hot(labels, n_way, torch.float32)
    at_once = max(
        1, min(FINETUNE_FEATURES_PER_BATCH // (2 * n_support * dim), FINETUNE_WEIGHTS_PER_BATCH // len(start))
    )
    parts = zip(support.split(at_once), hot.split(at_once), query.split(at_once), strict=True)
    return torch.cat([tune(*part) for part in parts])
