"""What a method is: its function, and what an evaluation has to know of it, in fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from protonet.episodes.draws.batch import Episodes

Method = Callable[[Episodes], Tensor]
#: What a method may need beside support and queries.
Need = Literal["base", "texts", "unlabelled", "encoder", "maps"]


@dataclass(frozen=True)
class MethodSpec:
    """One of our methods, which can be called as its function."""

    function: Callable[..., Tensor]  #: From a batch of episodes, and settings, to logits.
    transductive: bool = False  #: Classifies all queries of an episode together, not each alone.
    needs: tuple[Need, ...] = ()  #: What has to be there.
    uses_base: bool = False  #: Looks at the base classes if there are any.
    without_base: str | None = None  #: What it does where there are none, for a note to the report.
    objective: str | None = None  #: That the encoder it needs was trained for; None for any.
    adapts: bool = False  #: Embeds rows anew, by an encoder that it adapts.
    takes_means: bool = False  #: Knows a class by its mean alone, all that there is of base classes beside novel ones.
    slow: bool = False  #: Takes a tenth of a second an episode or more: evaluated where it is named, not by "all".
    alias: str | None = None  #: Another name of the method.

    def __call__(self, episodes: Episodes, **settings: Any) -> Tensor:
        """Return logits (episodes, n_queries, n_way)."""
        return self.function(episodes, **settings)
