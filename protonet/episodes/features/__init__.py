"""Sources of features: data sets by name or path, networks that embed pictures, normalisation."""
