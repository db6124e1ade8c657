"""The workloads by family, and which families may be looked at: drawn once, before any candidate had run on them.

A family's workloads share a kind of model, of data or of difficulty. Visible and studied families were looked at by
an earlier optimizer and by the study that its successor began with: both are for tuning. The others were drawn; AdamW
alone had run on them while they were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np

from analysis.optimizer_bench.workload import Build
from analysis.optimizer_bench.workloads import characters, dynamics, graphs, pictures, sources, streams, words

Family = Mapping[str, Build]
VISIBLE: dict[str, Family] = {
    "language": {"gpt": sources.gpt, "gru": sources.gru},
    "recommendation": {"recommender": words.recommender},
    "vision": {"cnn": characters.cnn, "vit": characters.vit, "vae": pictures.vae},
    "graphs": {"gnn": graphs.gnn},
    "episodes": {"prototype": characters.prototype},
}
STUDIED: dict[str, Family] = {
    "dense": {"syntax": sources.syntax, "pixels": pictures.pixels},
    "noise": {"labels": characters.labels, "spiky": dynamics.spiky},
    "recurrent": {"chain": dynamics.chain, "states": characters.states},
    "restoration": {"denoiser": pictures.denoiser},
    "tables": {"ranking": words.ranking, "words": words.words},
}
DRAWN: dict[str, Family] = {
    "attention": {"gat": graphs.gat, "gcn": graphs.gcn},
    "contrast": {"contrast": characters.contrast},
    "convex": {"softmax": words.softmax, "factor": pictures.factor},
    "densities": {"diffusion": pictures.diffusion},
    "multitask": {"heads": characters.heads, "experts": characters.experts},
    "physics": {"heat": dynamics.heat, "oscillator": dynamics.oscillator},
    "scales": {"loud": characters.loud, "faint": pictures.faint},
    "transfer": {"transfer": characters.transfer, "adapter": characters.adapter},
    "transformers": {"sorter": sources.sorter, "bert": sources.bert},
}
STREAMED: dict[str, Family] = {
    "language stream": {"grammar": streams.grammar},
    "vision stream": {"petals": streams.petals},
    "graph stream": {"hops": streams.hops},
    "transformer stream": {"regress": streams.regress},
    "recommendation stream": {"tastes": streams.tastes},
    "class stream": {"teacher": streams.teacher},
    "recurrent stream": {"chords": streams.chords},
    "restoration stream": {"jumps": streams.jumps},
}
#: Added for the selection at 5,000 steps: for most of them the minimum loss is 0, unlike for the tuning streams.
ADDED: dict[str, Family] = {
    "function stream": {"surface": streams.surface},
    "motion stream": {"spring": streams.spring},
    "set stream": {"kinds": streams.kinds},
}
FAMILIES = {**VISIBLE, **STUDIED, **DRAWN, **STREAMED, **ADDED}
WORKLOADS = {name: build for family in FAMILIES.values() for name, build in family.items()}
#: The scarce resource of a workload. In streams no row repeats; in the others rows repeat, and some of these train
#: embedding tables alone.
KIND = dict.fromkeys((*chain(*STREAMED.values(), *ADDED.values()), "heat", "sorter"), "streams")
KIND |= dict.fromkeys(("recommender", "ranking", "words"), "tables")
KIND |= dict.fromkeys(WORKLOADS.keys() - KIND.keys(), "few rows")
FAMILY = {name: family for family, workloads in FAMILIES.items() for name in workloads}


def draw() -> list[list[str]]:
    """List the families that were drawn for tuning, validation and test."""
    order: list[str] = np.random.default_rng(13).permutation(sorted(DRAWN)).tolist()
    return [order[:2], order[2:5], order[5:]]


def draw_streams() -> list[list[str]]:
    """List the families of streams for tuning and validation."""
    order: list[str] = np.random.default_rng(13).permutation(sorted(STREAMED)).tolist()
    return [order[:3], order[3:]]


#: Roles of families. The optimizer is chosen on ``visible`` and ``tuning`` families, with leave-one-family-out
#: estimates. Evaluations on ``validation`` are logged. At most two optimizers are evaluated on ``test``.
ROLES = {"visible": [*VISIBLE], "tuning": [*STUDIED, "scales", "contrast"]}
ROLES["tuning"] += ["class stream", "vision stream", "recommendation stream", *ADDED]
ROLES |= {"validation": ["physics", "attention", "multitask"]}
ROLES["validation"] += [
    "language stream",
    "restoration stream",
    "transformer stream",
    "graph stream",
    "recurrent stream",
]
ROLES |= {"test": ["transfer", "convex", "transformers", "densities"]}
ROLE = {name: role for role, families in ROLES.items() for family in families for name in FAMILIES[family]}
