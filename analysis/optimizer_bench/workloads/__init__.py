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
        "language": {"gpt": sources.gpt_byte_prediction, "gru": sources.gru_token_prediction},
        "recommendation": {"recommender": sources.matrix_factorization},
        "vision": {
            "cnn": pictures.cnn_classification,
            "vit": pictures.vit_classification,
            "vae": pictures.variational_autoencoder,
        },
        "graphs": {"gnn": graphs.graph_sage},
        "episodes": {"prototype": pictures.prototypical_network},
    },
    "tuning": {
        "dense": {"syntax": sources.token_type_labelling, "pixels": pictures.pixel_regression},
        "noise": {"labels": pictures.wrong_training_labels, "spiky": dynamics.regression_with_outliers},
        "recurrent": {"chain": dynamics.chaotic_series_forecasting, "states": pictures.state_space_classification},
        "restoration": {"denoiser": pictures.photograph_denoising},
        "tables": {"ranking": sources.pairwise_word_ranking, "words": sources.word2vec},
        "scales": {"loud": pictures.large_initial_weights, "faint": pictures.small_initial_outputs},
        "contrast": {"contrast": pictures.simclr},
        "class stream": {"teacher": streams.teacher_network},
        "vision stream": {"petals": streams.petal_counting},
        "recommendation stream": {"tastes": streams.user_item_preferences},
        # For most of these, unlike for other streams, the minimum loss is 0.
        "function stream": {"surface": streams.smooth_regression},
        "motion stream": {"spring": streams.driven_spring},
        "set stream": {"kinds": streams.distinct_card_counting},
    },
    "validation": {
        "physics": {"heat": dynamics.heat_equation, "oscillator": dynamics.coupled_pendulums},
        "attention": {"gat": graphs.graph_attention_network, "gcn": graphs.graph_convolution_network},
        "multitask": {"heads": pictures.multi_task_glyphs, "experts": pictures.mixture_of_experts},
        "language stream": {"grammar": streams.topic_grammar_prediction},
        "restoration stream": {"jumps": streams.piecewise_constant_denoising},
        "transformer stream": {"regress": streams.in_context_regression},
        "graph stream": {"hops": streams.graph_distance},
        "recurrent stream": {"chords": streams.chord_forecasting},
    },
}


class WorkloadGroups(NamedTuple):
    """The groups that a workload belongs to: its role, family and kind; results are averaged by group."""

    role: str = FILE_WORKLOAD_ROLE
    family: str = FILE_WORKLOAD_ROLE
    kind: str = FILE_WORKLOAD_ROLE
    """The scarce resource. In streams no row repeats; tables of vectors see few of their rows in a step."""


KIND_OF_WORKLOAD = dict.fromkeys(("recommender", "ranking", "words"), "tables") | {"heat": "streams"}
WORKLOADS = {
    name: build
    for families in WORKLOADS_BY_ROLE.values()
    for builds in families.values()
    for name, build in builds.items()
}
GROUPS_OF_WORKLOAD = {
    name: WorkloadGroups(
        role, family, "streams" if build.__module__ == streams.__name__ else KIND_OF_WORKLOAD.get(name, "few rows")
    )
    for role, families in WORKLOADS_BY_ROLE.items()
    for family, builds in families.items()
    for name, build in builds.items()
}


def get_groups(name: str) -> WorkloadGroups:
    """Return the groups of a built-in workload, or the common groups of all workloads from a file."""
    return GROUPS_OF_WORKLOAD.get(name, WorkloadGroups())
