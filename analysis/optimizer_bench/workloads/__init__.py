"""The workloads by family, and which families may be looked at: drawn once, before any candidate had run on them.

A family's workloads share a kind of model, of data or of difficulty. Visible and studied families were looked at by
an earlier optimizer and by the study that its successor began with: both are for tuning. The others were drawn; AdamW
alone had run on them while they were made.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from analysis.optimizer_bench.workload import Build
from analysis.optimizer_bench.workloads import (
    attention,
    contrast,
    convex,
    dense,
    densities,
    gnn,
    images,
    multitask,
    noise,
    physics,
    prototype,
    recommender,
    recurrent,
    restoration,
    scales,
    tables,
    text,
    transfer,
    transformers,
)

Family = Mapping[str, Build]
VISIBLE: dict[str, Family] = {
    "language": text.WORKLOADS,
    "recommendation": recommender.WORKLOADS,
    "vision": images.WORKLOADS,
    "graphs": gnn.WORKLOADS,
    "episodes": prototype.WORKLOADS,
}
STUDIED: dict[str, Family] = {
    "dense": dense.WORKLOADS,
    "noise": noise.WORKLOADS,
    "recurrent": recurrent.WORKLOADS,
    "restoration": restoration.WORKLOADS,
    "tables": tables.WORKLOADS,
}
DRAWN: dict[str, Family] = {
    "attention": attention.WORKLOADS,
    "contrast": contrast.WORKLOADS,
    "convex": convex.WORKLOADS,
    "densities": densities.WORKLOADS,
    "multitask": multitask.WORKLOADS,
    "physics": physics.WORKLOADS,
    "scales": scales.WORKLOADS,
    "transfer": transfer.WORKLOADS,
    "transformers": transformers.WORKLOADS,
}
FAMILIES = {**VISIBLE, **STUDIED, **DRAWN}
WORKLOADS = {name: build for family in FAMILIES.values() for name, build in family.items()}
FAMILY = {name: family for family, workloads in FAMILIES.items() for name in workloads}


def draw() -> list[list[str]]:
    """Return the drawn families for tuning, validation and test."""
    order: list[str] = np.random.default_rng(13).permutation(sorted(DRAWN)).tolist()
    return [order[:2], order[2:5], order[5:]]


#: The role of each family: ``visible`` and ``tuning`` ones decide on the optimizer, one left out at a time; a look at
#: ``validation`` is logged; ``test`` is run twice at the most.
ROLES = {"visible": [*VISIBLE], "tuning": [*STUDIED, "scales", "contrast"]}
ROLES |= {"validation": ["physics", "attention", "multitask"]}
ROLES |= {"test": ["transfer", "convex", "transformers", "densities"]}
ROLE = {name: role for role, families in ROLES.items() for family in families for name in FAMILIES[family]}
