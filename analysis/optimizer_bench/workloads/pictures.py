"""Workloads of pictures: characters of matplotlib's fonts, which are classified, completed or encoded; photographs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import (
    IMAGE_SIDE,
    PIXELS_PER_IMAGE,
    ResidualLayers,
    WorkloadTask,
    hold_out,
    load_ascii_glyphs,
    load_latin_glyphs,
    load_photograph,
    make_classification_loss,
    make_classification_task,
    make_convolutions,
    make_mlp,
    make_row_task,
    make_seed_zero_generator,
    make_transformer,
    make_workload_builder,
    shuffled_batches,
    standardise,
)
from protonet.losses import episodic_loss
from protonet.sampling import index_classes, sample_episodes

PATCH_SIDE, VIT_WIDTH = 7, 64  #: Patch size and width of the vision transformer.
WRONG_LABEL_FRACTION = 0.3  #: Fraction of training labels that are replaced by another class.
N_EXPERTS, LOAD_BALANCE_WEIGHT = 8, 0.01  #: Number of experts, and the weight of the load-balancing loss.
STATE_SPACE_CHANNELS, STATES_PER_CHANNEL = 16, 8
#: Range of the initial time steps of the channels: the state decays by exp(-STATE_SPACE_DECAY * step) per pixel.
STATE_SPACE_STEP_RANGE, STATE_SPACE_DECAY = (0.01, 0.2), 0.5
HELD_OUT_CLASS_INTERVAL = 5  #: Every fifth character is held out if validation is on new characters.
EPISODE_SIZES = {"n_way": 20, "n_shot": 1, "n_query": 4}
#: Largest rotation, zoom and shift of a view, where half of the picture's side is 1.
MAX_ROTATION, MAX_ZOOM, MAX_SHIFT = math.radians(20), 0.25, 0.15
PIXEL_NOISE_STD, CONTRASTIVE_TEMPERATURE = 0.1, 0.2  #: Standard deviation of the noise of a view; the temperature.
#: Pixels per side of a tile, and range of the standard deviation of its noise, for colours in [0, 1].
TILE_SIDE, NOISE_STD_RANGE = 12, (0.02, 0.3)
N_FREQUENCIES, MLP_WIDTH = 48, 96


@make_workload_builder
def cnn_classification() -> WorkloadTask:
    """Classify Latin characters by three strided convolutions and a linear head."""

    def make_model(num_classes: int) -> nn.Module:
        convolutions = make_convolutions(1, 16, 32, 32, stride=2)
        image = nn.Unflatten(1, (1, IMAGE_SIDE, IMAGE_SIDE))
        return nn.Sequential(image, *convolutions, nn.Flatten(), nn.Linear(512, num_classes))

    return make_classification_task(make_model, load_latin_glyphs(), n_validation=300, batch_size=32)


class ViT(nn.Module):
    """A vision transformer: patches with learned positions, pre-norm transformer layers, mean over patches, head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, VIT_WIDTH, PATCH_SIDE, stride=PATCH_SIDE)
        self.positions = nn.Parameter(0.02 * torch.randn((IMAGE_SIDE // PATCH_SIDE) ** 2, VIT_WIDTH))
        self.layers = nn.Sequential(make_transformer(VIT_WIDTH), nn.LayerNorm(VIT_WIDTH))
        self.head = nn.Linear(VIT_WIDTH, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, pixels) to logits (n, num_classes)."""
        patches = self.patches(images.view(-1, 1, IMAGE_SIDE, IMAGE_SIDE)).flatten(2)  # (n, width, patches)
        logits: Tensor = self.head(self.layers(patches.transpose(1, 2) + self.positions).mean(dim=1))
        return logits


@make_workload_builder
def vit_classification() -> WorkloadTask:
    """Classify ASCII characters by a transformer of their patches."""
    return make_classification_task(ViT, load_ascii_glyphs(), n_validation=200, batch_size=16)


@make_workload_builder
def large_initial_weights() -> WorkloadTask:
    """Classify characters by an MLP whose initial weights, and thus its initial logits, are far too large."""
    initial_weight_factor = 10.0  # factor on torch's default initial weights

    def make_model(num_classes: int) -> nn.Module:
        model = make_mlp(PIXELS_PER_IMAGE, 96, 96, num_classes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(initial_weight_factor)
        return model

    return make_classification_task(make_model, load_ascii_glyphs(), n_validation=300, batch_size=32)


@make_workload_builder
def wrong_training_labels() -> WorkloadTask:
    """Classify characters with many wrong training labels; validation labels are correct.

    Source: C. Zhang et al. (2017), Understanding deep learning requires rethinking generalization, arXiv 1611.03530.
    """
    data, generator = load_ascii_glyphs(), make_seed_zero_generator()
    validation, train = torch.randperm(len(data.x), generator=generator).tensor_split([300])
    y = data.y.clone()
    other = torch.randint(1, data.num_classes, train.shape, generator=generator)
    wrong = torch.rand(train.shape, generator=generator) < WRONG_LABEL_FRACTION
    y[train] = torch.where(wrong, (y[train] + other) % data.num_classes, y[train])
    make_model = functools.partial(make_mlp, PIXELS_PER_IMAGE, 96, 96, data.num_classes, norm=nn.LayerNorm)
    return make_row_task(make_model, make_classification_loss(data.x, y), (train, validation), 16)


def compute_image_moments(images: Tensor) -> Tensor:
    """Compute the image moments (n, moments) of images (n, pixels) up to second order, in pixels.

    The moments are the sum of the grey values, their mean row and column, the variances of both and their covariance.
    """
    positions = torch.cartesian_prod(torch.arange(IMAGE_SIDE), torch.arange(IMAGE_SIDE)).float()  # (pixels, 2)
    total = images.sum(1, keepdim=True)  # (n, 1)
    ink = images / total
    mean = ink @ positions  # (n, 2)
    row, column = (positions - mean.unsqueeze(1)).unbind(2)  # each (n, pixels)
    moments = [(ink * product).sum(1, keepdim=True) for product in (row * row, column * column, row * column)]
    return torch.cat([total, mean, *moments], 1)


@make_workload_builder
def multi_task_glyphs() -> WorkloadTask:
    """Predict a glyph's character and image moments, and reconstruct it, by several heads on a shared trunk.

    The training loss is the unweighted sum of the losses, whose initial values differ: 4.5 for classes, 150 for shapes
    and 0.04 for pixels. The validation loss is the mean of the losses relative to those of a constant prediction.
    """
    data = load_ascii_glyphs()
    shapes = compute_image_moments(data.x)
    shapes -= shapes.mean(0)
    guesses = torch.stack([torch.tensor(math.log(data.num_classes)), shapes.var(), data.x.var(0).mean()])

    n_moments = 6  # number of image moments of a character

    def make_model() -> nn.Module:
        trunk = nn.Sequential(make_mlp(PIXELS_PER_IMAGE, 96, 48), nn.ReLU())
        sizes = data.num_classes, n_moments, PIXELS_PER_IMAGE
        return nn.ModuleList([trunk, *(nn.Linear(48, outputs) for outputs in sizes)])

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        trunk, *branches = model.children()
        x = trunk(data.x[rows])  # (n, width)
        logits, shape, image = (head(x) for head in branches)
        class_loss = F.cross_entropy(logits, data.y[rows])
        losses = torch.stack([class_loss, F.mse_loss(shape, shapes[rows]), F.mse_loss(image, data.x[rows])])  # (tasks,)
        return losses.sum() if model.training else (losses / guesses).mean()

    return make_row_task(make_model, loss, hold_out(torch.arange(len(data.x)), 300), 32)


class MixtureOfExperts(nn.Module):
    """A mixture of experts with a residual connection and a linear head; a gate chooses each image's expert.

    Source: W. Fedus, B. Zoph and N. Shazeer (2022), Switch transformers, arXiv 2101.03961, (1) to (6).
    """

    def __init__(self, num_classes: int, width: int = 64, hidden: int = 48) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(PIXELS_PER_IMAGE, width), nn.ReLU())
        self.gate = nn.Linear(width, N_EXPERTS)
        self.rise = nn.Parameter(torch.randn(N_EXPERTS, width, hidden) * math.sqrt(2 / width))
        self.fall = nn.Parameter(torch.randn(N_EXPERTS, hidden, width) * math.sqrt(2 / hidden))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map images (n, pixels) to logits (n, num_classes) and the load imbalance, 0-d: 1 for equally used experts."""
        x: Tensor = self.stem(images)  # (n, width)
        gate_weights = self.gate(x).softmax(1)  # (n, experts)
        gate_weight, chosen = gate_weights.max(1)  # each (n,)
        # Each expert sees all images, which so few experts do faster than they would sort them.
        outputs = (x @ self.rise).relu() @ self.fall  # (experts, n, width)
        x = x + gate_weight.unsqueeze(1) * outputs[chosen, torch.arange(len(x))]
        busy = F.one_hot(chosen, N_EXPERTS).float().mean(0)  # (experts,)
        return self.head(x), N_EXPERTS * (busy * gate_weights.mean(0)).sum()


@make_workload_builder
def mixture_of_experts() -> WorkloadTask:
    """Classify characters by a mixture of experts; only the training loss includes the load imbalance."""
    data = load_latin_glyphs()

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        logits, imbalance = model(data.x[rows])
        total: Tensor = F.cross_entropy(logits, data.y[rows]) + LOAD_BALANCE_WEIGHT * imbalance * model.training
        return total

    make_model = functools.partial(MixtureOfExperts, data.num_classes)
    return make_row_task(make_model, loss, hold_out(torch.arange(len(data.x)), 300), 32)


class StateSpaceLayer(nn.Module):
    """A linear state-space model of each channel with a diagonal transition, as one long convolution.

    A state is x_t = exp(step * (i frequency - decay)) x_(t-1) + step * u_t; the output is the real part of the sum of
    a channel's states, each times its complex readout weight, plus a multiple of u_t.

    Source: A. Gu et al. (2022), On the parameterization and initialization of diagonal state space models,
        arXiv 2206.11893: S4D-Lin.
    """

    def __init__(self) -> None:
        super().__init__()
        shape = STATE_SPACE_CHANNELS, STATES_PER_CHANNEL
        log_step = torch.empty(STATE_SPACE_CHANNELS, 1).uniform_(*map(math.log, STATE_SPACE_STEP_RANGE))
        self.log_step = nn.Parameter(log_step)
        self.log_decay = nn.Parameter(torch.full(shape, math.log(STATE_SPACE_DECAY)))
        self.frequency = nn.Parameter(math.pi * torch.arange(STATES_PER_CHANNEL).repeat(STATE_SPACE_CHANNELS, 1))
        self.readout = nn.Parameter(torch.randn(2, *shape))
        self.through = nn.Parameter(torch.randn(STATE_SPACE_CHANNELS))

    def compute_kernel(self, length: int) -> Tensor:
        """Compute the impulse response (channels, length): the output 0, 1, ... steps after a unit input."""
        time = self.log_step.exp() * torch.arange(length)  # (channels, length)
        decay = torch.exp(-self.log_decay.exp()[..., None] * time[:, None])  # (channels, states, length)
        angle = self.frequency[..., None] * time[:, None]
        real, imaginary = self.log_step.exp()[..., None] * self.readout[..., None]
        return torch.sum(decay * (real * angle.cos() - imaginary * angle.sin()), 1)

    def forward(self, u: Tensor) -> Tensor:
        """Map inputs (n, channels, length) to outputs of the same shape."""
        length = u.shape[2]
        spectra = [torch.fft.rfft(x, 2 * length) for x in (self.compute_kernel(length), u)]
        remembered = torch.fft.irfft(torch.mul(*spectra), 2 * length)[..., :length]
        return torch.add(remembered, self.through[:, None] * u)


@make_workload_builder
def state_space_classification() -> WorkloadTask:
    """Classify characters by the mean output of a state-space model that reads one pixel at a time.

    Each layer has a norm, a state-space model, a gated mix of channels, and a residual connection.
    """
    channels = STATE_SPACE_CHANNELS

    def make_model(num_classes: int) -> nn.Module:
        layers = []
        for _ in range(2):
            mix = StateSpaceLayer(), nn.GELU(), nn.Conv1d(channels, 2 * channels, 1), nn.GLU(dim=1)
            layers.append(ResidualLayers(nn.BatchNorm1d(channels), *mix))
        pool = nn.AdaptiveAvgPool1d(1), nn.Flatten()
        return nn.Sequential(nn.Conv1d(1, channels, 1), *layers, *pool, nn.Linear(channels, num_classes))

    data = load_ascii_glyphs()
    # Pixels per side of the downsampled pictures that are read pixel by pixel.
    sequence_image_side = 8
    x = F.adaptive_avg_pool2d(data.x.view(-1, 1, IMAGE_SIDE, IMAGE_SIDE), sequence_image_side)
    data = data._replace(x=x.flatten(2))  # (n, 1, pixels)
    return make_classification_task(make_model, data, n_validation=64, batch_size=16)


@make_workload_builder
def prototypical_network() -> WorkloadTask:
    """Classify a few Latin characters by the nearest class mean of embeddings; the seed determines the episodes.

    This is the training of prototypical networks, validated on characters that are not in the training set.
    """
    data = load_latin_glyphs()
    classes = torch.arange(data.num_classes)
    index = index_classes(data.y)
    held_out = classes % HELD_OUT_CLASS_INTERVAL == 0
    train, novel = (index.select_classes(classes[chosen]) for chosen in (~held_out, held_out))

    def stream(generator: torch.Generator) -> Iterator[Tensor]:
        while True:
            yield sample_episodes(train, **EPISODE_SIZES, n_episodes=1, generator=generator)

    def loss(model: nn.Module, episodes: Tensor) -> Tensor:
        embeddings = F.normalize(model(data.x[episodes]), dim=-1)  # (episodes, way, shot + query, embedding)
        return episodic_loss(embeddings, n_shot=EPISODE_SIZES["n_shot"], temperature=0.1)

    make_model = functools.partial(make_mlp, PIXELS_PER_IMAGE, 192, 64, activation=nn.GELU)
    validation = sample_episodes(novel, **EPISODE_SIZES, n_episodes=8, generator=make_seed_zero_generator())
    return WorkloadTask(make_model, loss, stream, validation)


def augment_views(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Augment each picture (n, 1, side, side) twice: (2 n, 1, side, side); two views of a picture are n rows apart."""
    angle, zoom, right, down = 2 * torch.rand(4, 2 * len(pictures), generator=generator) - 1  # each (2 n,) in [-1, 1]
    cos, sin = ((1 + MAX_ZOOM * zoom) * side for side in ((MAX_ROTATION * angle).cos(), (MAX_ROTATION * angle).sin()))
    maps = torch.stack((cos, -sin, MAX_SHIFT * right, sin, cos, MAX_SHIFT * down), 1).view(-1, 2, 3)
    grid = F.affine_grid(maps, [len(maps), 1, IMAGE_SIDE, IMAGE_SIDE], align_corners=False)
    views = F.grid_sample(pictures.repeat(2, 1, 1, 1), grid, align_corners=False)
    return views + PIXEL_NOISE_STD * torch.randn(views.shape, generator=generator)


def contrastive_loss(embeddings: Tensor) -> Tensor:
    """Compute the cross-entropy, 0-d, of identifying the other view of each row of (2 n, dim), which is n rows apart.

    Source: T. Chen et al. (2020), A simple framework for contrastive learning of visual representations,
        arXiv 2002.05709, algorithm 1.
    """
    unit = F.normalize(embeddings, dim=1)
    similar = (unit @ unit.T / CONTRASTIVE_TEMPERATURE).fill_diagonal_(-math.inf)  # (2 n, 2 n)
    return F.cross_entropy(similar, torch.arange(len(unit)).roll(len(unit) // 2))


@make_workload_builder
def simclr() -> WorkloadTask:
    """Train embeddings that match two views of each picture (SimCLR); the seed determines the views, too."""
    data, generator = load_latin_glyphs(), make_seed_zero_generator()
    pictures = data.x.view(-1, 1, IMAGE_SIDE, IMAGE_SIDE)
    novel = data.y % HELD_OUT_CLASS_INTERVAL == 0
    train, validation = pictures[~novel], pictures[novel]
    few = torch.randperm(len(validation), generator=generator)[:64]

    def make_model() -> nn.Module:
        convolutions = make_convolutions(1, 8, 16, 32, stride=2, bias=True)
        return nn.Sequential(*convolutions, nn.Flatten(), make_mlp(512, 64, 32))

    stream, views = shuffled_batches(train, 16, augment_views), augment_views(validation[few], generator)
    return WorkloadTask(make_model, lambda model, x: contrastive_loss(model(x)), stream, views)


@make_workload_builder
def variational_autoencoder() -> WorkloadTask:
    """Train a variational autoencoder of Latin characters; the seed determines the latent noise of training, too.

    An encoder gives the mean and log variance of a latent, and a decoder the logits of pixels. The loss is the negative
    evidence lower bound, in nats per image.
    """
    train, validation = hold_out(load_latin_glyphs().x, 1000)

    latent_dim = 16  # width of the latent of the autoencoder

    def make_model() -> nn.Module:
        encoder, decoder = (PIXELS_PER_IMAGE, 128, 2 * latent_dim), (latent_dim, 128, PIXELS_PER_IMAGE)
        return nn.ModuleList([make_mlp(*encoder), make_mlp(*decoder)])

    def add_latent_noise(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return images, torch.randn(len(images), latent_dim, generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        (encoder, decoder), (images, noise) = model.children(), batch
        mean, log_variance = encoder(images).chunk(2, dim=1)  # each (n, latent)
        logits = decoder(mean + noise * (log_variance / 2).exp())  # (n, pixels)
        divergence: Tensor = (mean**2 + log_variance.exp() - 1 - log_variance).sum() / 2
        surprise = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        return (surprise + divergence) / len(images)

    held_out = validation, torch.zeros(len(validation), latent_dim)
    return WorkloadTask(make_model, loss, shuffled_batches(train, 64, add_latent_noise), held_out)


class DownscaledLinear(nn.Module):
    """A linear layer with initial weights of standard deviation 1, whose outputs are scaled down.

    Source: T. Karras et al. (2018), Progressive growing of GANs, arXiv 1710.10196, section 4.1; there by He's constant
        alone.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs) to (n, outputs)."""
        # Factor on the outputs of a layer that preserves the scale of its inputs.
        initial_output_scale = 0.1
        return initial_output_scale * F.linear(x, self.weight / math.sqrt(x.shape[1]), self.bias)


@make_workload_builder
def small_initial_outputs() -> WorkloadTask:
    """Predict the lower half of a character from its upper half, with initial outputs near 0."""

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        upper, lower = rows.chunk(2, dim=1)
        return F.binary_cross_entropy_with_logits(model(upper), lower)

    half = PIXELS_PER_IMAGE // 2
    make_model = functools.partial(make_mlp, half, 96, 96, half, linear=DownscaledLinear)
    return make_row_task(make_model, loss, hold_out(load_ascii_glyphs().x, 300), 32)


@make_workload_builder
def photograph_denoising() -> WorkloadTask:
    """Remove noise of unknown level from tiles of photographs; the loss is 1000 times the mean squared error.

    Convolutions predict the noise, which is subtracted.

    Source: K. Zhang et al. (2017), Beyond a Gaussian denoiser: residual learning of deep CNN for image denoising,
        arXiv 1608.03981.
    """
    images = torch.stack(list(map(load_photograph, ("china.jpg", "flower.jpg")))).movedim(3, 1) / 255
    tiles = images.unfold(2, TILE_SIDE, TILE_SIDE).unfold(3, TILE_SIDE, TILE_SIDE)  # (2, 3, rows, columns, tile, tile)
    tiles = tiles.permute(0, 2, 3, 1, 4, 5).flatten(0, 2).contiguous()  # (n, 3, tile, tile)

    def make_model() -> nn.Module:
        first = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()
        return nn.Sequential(*first, *make_convolutions(16, 16, 16), nn.Conv2d(16, 3, 3, padding=1))

    def add_noise(clean: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        low, high = NOISE_STD_RANGE
        levels = low + (high - low) * torch.rand(len(clean), 1, 1, 1, generator=generator)
        return clean + levels * torch.randn(clean.shape, generator=generator), clean

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        noisy, clean = batch
        return 1000 * F.mse_loss(noisy - model(noisy), clean)

    return make_row_task(make_model, loss, hold_out(tiles, 64), 8, add_noise)


class FourierFeatures(nn.Module):
    """Fourier features: cosines and sines of numerical features times learned frequencies."""

    def __init__(self, features: int) -> None:
        super().__init__()
        # Standard deviation of the initial frequencies, in periods per picture.
        initial_frequency_std = 16.0
        self.frequencies = nn.Parameter(initial_frequency_std * torch.randn(features, N_FREQUENCIES))

    def forward(self, x: Tensor) -> Tensor:
        """Map features (n, features) to (n, 2 * frequencies)."""
        angles = 2 * math.pi * x @ self.frequencies  # (n, frequencies)
        return torch.cat((angles.cos(), angles.sin()), 1)


@make_workload_builder
def pixel_regression() -> WorkloadTask:
    """Predict the standardised colour of a photograph's pixel from its position, in [0, 1]: a table of two columns.

    Source: Y. Gorishniy et al. (2021), Revisiting deep learning models for tabular data, arXiv 2106.11959, and
        (2022), On embeddings for numerical features in tabular deep learning, arXiv 2203.05556.
    """
    image = load_photograph()
    x = torch.cartesian_prod(*(torch.linspace(0, 1, size) for size in image.shape[:2]))  # (n, 2)
    y = standardise(image.flatten(0, 1))  # (n, 3)

    def make_model() -> nn.Module:
        layers: list[nn.Module] = [FourierFeatures(2), nn.Linear(2 * N_FREQUENCIES, MLP_WIDTH)]
        for _ in range(2):
            layers.append(ResidualLayers(nn.BatchNorm1d(MLP_WIDTH), make_mlp(MLP_WIDTH, 2 * MLP_WIDTH, MLP_WIDTH)))
        return nn.Sequential(*layers, nn.BatchNorm1d(MLP_WIDTH), nn.ReLU(), nn.Linear(MLP_WIDTH, 3))

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.mse_loss(model(x[rows]), y[rows])

    return make_row_task(make_model, loss, hold_out(torch.arange(len(x)), 2048), 256)
