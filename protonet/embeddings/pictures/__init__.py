"""Pictures as features: reading files, our own fixed features, and backbones that a person brings."""

#: What a backbone's metadata, or a person, may say of the pictures that it takes.
SETTINGS = ("size", "mean", "std")
