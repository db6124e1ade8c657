"""Views of the features, one kind per file, behind the protocol of `protonet.views.view`."""

from __future__ import annotations

from protonet.views.evaluation import ViewFamily
from protonet.views.fixed_convolution import FixedConvolutionFamily, FixedConvolutionView, KernelBank
from protonet.views.forest import ForestFamily, ForestView
from protonet.views.kernel_ridge import KernelRidgeFamily, KernelRidgeView
from protonet.views.linear import LinearFamily, LinearView
from protonet.views.mlp import MLPFamily, MLPView
from protonet.views.tabular_transformer import TabularTransformerFamily, TabularTransformerView
from protonet.views.view import LinearMap, Source, View

#: Families of views, in the order of evaluation: sources before the views that read them, trained views last. A new
#: family is a file in this package, and a line here.
VIEW_FAMILIES: tuple[tuple[type[ViewFamily], type[View]], ...] = (
    (LinearFamily, LinearView),
    (KernelRidgeFamily, KernelRidgeView),
    (FixedConvolutionFamily, FixedConvolutionView),
    (ForestFamily, ForestView),
    (TabularTransformerFamily, TabularTransformerView),
    (MLPFamily, MLPView),
)
#: Sources that views read, other than the features.
SOURCES: tuple[type[Source], ...] = (LinearMap, KernelBank)
