"""Pictures as features: reading files, our own fixed features, and backbones that a person brings."""
