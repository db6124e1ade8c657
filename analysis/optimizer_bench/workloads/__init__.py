"""The benchmark's workloads by role and family. Workloads of a family share a kind of model, of data or of difficulty.

The optimizer is chosen on visible and tuning families, with leave-one-family-out estimates. Evaluations on validation
families are logged. Roles were drawn before any candidate had run; visible families, and those up to "tables" of
tuning, had been looked at before.
"""

from __future__ import annotations

from typing import NamedTuple

from analysis.optimizer_bench.workloads import dynamics, graphs, pictures, sources, streams

FILE_WORKLOAD_ROLE = "file"  #: Role, family and kind of the workloads of a file.

WORKLOADS_BY_ROLE = {
    "visible": {
        "language": (sources.gpt, sources.gru),
        "recommendation": (sources.recommender,),
        "vision": (pictures.cnn, pictures.vit, pictures.vae),
        "graphs": (graphs.gnn,),
        "episodes": (pictures.prototype,),
    },
    "tuning": {
        "dense": (sources.syntax, pictures.pixels),
        "noise": (pictures.labels, dynamics.spiky),
        "recurrent": (dynamics.chain, pictures.states),
        "restoration": (pictures.denoiser,),
        "tables": (sources.ranking, sources.words),
        "scales": (pictures.loud, pictures.faint),
        "contrast": (pictures.contrast,),
        "class stream": (streams.teacher,),
        "vision stream": (streams.petals,),
        "recommendation stream": (streams.tastes,),
        # For most of these, unlike for other streams, the minimum loss is 0.
        "function stream": (streams.surface,),
        "motion stream": (streams.spring,),
        "set stream": (streams.kinds,),
    },
    "validation": {
        "physics": (dynamics.heat, dynamics.oscillator),
        "attention": (graphs.gat, graphs.gcn),
        "multitask": (pictures.heads, pictures.experts),
        "language stream": (streams.grammar,),
        "restoration stream": (streams.jumps,),
        "transformer stream": (streams.regress,),
        "graph stream": (streams.hops,),
        "recurrent stream": (streams.chords,),
    },
}


class WorkloadGroups(NamedTuple):
    """The groups that a workload belongs to: its role, family and kind; results are averaged by group."""

    role: str = FILE_WORKLOAD_ROLE
    family: str = FILE_WORKLOAD_ROLE
    #: The scarce resource. In streams no row repeats; tables of vectors see few of their rows in a step.
    kind: str = FILE_WORKLOAD_ROLE


KINDS = dict.fromkeys(("recommender", "ranking", "words"), "tables") | {"heat": "streams"}
WORKLOADS = {
    build.__name__: build for families in WORKLOADS_BY_ROLE.values() for builds in families.values() for build in builds
}
GROUPS_OF_WORKLOAD = {
    build.__name__: WorkloadGroups(
        role, family, "streams" if build.__module__ == streams.__name__ else KINDS.get(build.__name__, "few rows")
    )
    for role, families in WORKLOADS_BY_ROLE.items()
    for family, builds in families.items()
    for build in builds
}


def get_groups(name: str) -> WorkloadGroups:
    """Return the groups of a built-in workload, or the common groups of all workloads from a file."""
    return GROUPS_OF_WORKLOAD.get(name, WorkloadGroups())
