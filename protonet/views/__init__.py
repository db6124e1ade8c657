"""Views: feature maps whose outputs are concatenated to the embedding. There is one kind of view per file."""

from __future__ import annotations

from protonet.views.density import DensityFamily, DensityView
from protonet.views.evaluation import ViewFamily
from protonet.views.fixed_convolution import FixedConvolutionFamily, FixedConvolutionView, KernelBank
from protonet.views.forest import ForestFamily, ForestView
from protonet.views.kernel_ridge import KernelRidgeFamily, KernelRidgeView
from protonet.views.linear import LinearFamily, LinearView
from protonet.views.mlp import MLPFamily, MLPView
from protonet.views.tabular_transformer import TabularTransformerFamily, TabularTransformerView
from protonet.views.view import InputMap, LinearMap, View

#: For each type of view, the class that evaluates candidates and the class of fitted views, in the order of
#: evaluation. Linear views are first, since other views read their output. Convolutions are next: where they are good,
#: most other views are pruned. Trained views are last.
VIEW_FAMILIES: tuple[tuple[type[ViewFamily], type[View]], ...] = (
    (LinearFamily, LinearView),
    (FixedConvolutionFamily, FixedConvolutionView),
    (KernelRidgeFamily, KernelRidgeView),
    (DensityFamily, DensityView),
    (ForestFamily, ForestView),
    (TabularTransformerFamily, TabularTransformerView),
    (MLPFamily, MLPView),
)
#: Classes of the feature maps whose output views can take as input.
INPUT_MAP_CLASSES: tuple[type[InputMap], ...] = (LinearMap, KernelBank)
