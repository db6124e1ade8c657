"""The specification of a method: its function, and the properties that an evaluation depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from protonet.episodes.samplers.batch import Episodes

Method = Callable[[Episodes], Tensor]
#: Inputs that a method may need in addition to support and queries.
Need = Literal["base", "texts", "unlabelled", "encoder", "maps"]


@dataclass(frozen=True)
class MethodSpec:
    """A method with its properties, which can be called like its function."""

    function: Callable[..., Tensor]  #: From a batch of episodes, and settings, to logits.
    transductive: bool = False  #: Classifies all queries of an episode together, not each alone.
    needs: tuple[Need, ...] = ()  #: Inputs without which it cannot run.
    uses_base: bool = False  #: Looks at the base classes if there are any.
    without_base: str | None = None  #: How it replaces missing base classes, for a note in the report.
    objective: str | None = None  #: That the encoder it needs was trained for; None for any.
    adapts: bool = False  #: Embeds rows anew, by an encoder that it adapts.
    takes_means: bool = False  #: Uses the mean of each class only, so that it can classify base classes, too.
    slow: bool = False  #: Takes a tenth of a second an episode or more: evaluated where it is named, not by "all".
    alias: str | None = None  #: Another name of the method.

    def __call__(self, episodes: Episodes, **settings: object) -> Tensor:
        """Return logits (episodes, n_queries, n_way)."""
        return self.function(episodes, **settings)
