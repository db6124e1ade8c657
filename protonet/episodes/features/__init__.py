"""Sources of features: data sets by name or path, networks that embed pictures, normalisation."""

#: none: rows as they are. l2: rows of unit norm. cl2: rows less the base classes' mean, then of unit norm. z: rows less
#: the mean of their own features, over their standard deviation.
NORMALIZATIONS = ("none", "l2", "cl2", "z")
