"""Views of the features, one kind per file, behind the protocol of `protonet.views.view`."""

from __future__ import annotations

from protonet.views.context import ContextKind, ContextView
from protonet.views.forest import ForestKind, ForestView
from protonet.views.judge import Kind
from protonet.views.linear import LinearKind, LinearView
from protonet.views.mlp import MLPKind, MLPView
from protonet.views.patterns import Bank, PatternKind, PatternView
from protonet.views.radial import RadialKind, RadialView
from protonet.views.view import LinearMap, Source, View

#: Every kind of view, in the order in which the search tries them: what is read comes first, what is trained last.
#: A new kind is a file beside these, and a line here.
KINDS: tuple[tuple[type[Kind], type[View]], ...] = (
    (LinearKind, LinearView),
    (RadialKind, RadialView),
    (PatternKind, PatternView),
    (ForestKind, ForestView),
    (ContextKind, ContextView),
    (MLPKind, MLPView),
)
#: What views read, other than the features.
SOURCES: tuple[type[Source], ...] = (LinearMap, Bank)
