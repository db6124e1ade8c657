"""The workloads by role and family. A family's workloads share a kind of model, of data or of difficulty.

The optimizer is chosen on visible and tuning families, with leave-one-family-out estimates. Evaluations on validation
families are logged. Roles were drawn before any candidate had run; visible families, and those up to "tables" of
tuning, had been looked at before.
"""

from __future__ import annotations

from analysis.optimizer_bench.workloads import characters, dynamics, graphs, pictures, sources, streams, words

WORKLOADS_BY_ROLE = {
    "visible": {
        "language": (sources.gpt, sources.gru),
        "recommendation": (words.recommender,),
        "vision": (characters.cnn, characters.vit, pictures.vae),
        "graphs": (graphs.gnn,),
        "episodes": (characters.prototype,),
    },
    "tuning": {
        "dense": (sources.syntax, pictures.pixels),
        "noise": (characters.labels, dynamics.spiky),
        "recurrent": (dynamics.chain, characters.states),
        "restoration": (pictures.denoiser,),
        "tables": (words.ranking, words.words),
        "scales": (characters.loud, pictures.faint),
        "contrast": (characters.contrast,),
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
        "multitask": (characters.heads, characters.experts),
        "language stream": (streams.grammar,),
        "restoration stream": (streams.jumps,),
        "transformer stream": (streams.regress,),
        "graph stream": (streams.hops,),
        "recurrent stream": (streams.chords,),
    },
}
WORKLOADS = {
    build.__name__: build for families in WORKLOADS_BY_ROLE.values() for builds in families.values() for build in builds
}
ROLE_OF_WORKLOAD = {
    build.__name__: role
    for role, families in WORKLOADS_BY_ROLE.items()
    for builds in families.values()
    for build in builds
}
FAMILY_OF_WORKLOAD = {
    build.__name__: name
    for families in WORKLOADS_BY_ROLE.values()
    for name, builds in families.items()
    for build in builds
}
#: The scarce resource of a workload. In streams no row repeats; tables of vectors see few of their rows in a step.
KIND_OF_WORKLOAD = dict.fromkeys(WORKLOADS, "few rows") | dict.fromkeys(("recommender", "ranking", "words"), "tables")
KIND_OF_WORKLOAD |= {
    name: "streams" for name, build in WORKLOADS.items() if build.__module__ == streams.__name__ or name == "heat"
}
