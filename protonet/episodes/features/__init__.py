"""Where features come from: data sets by name or path, networks that embed pictures, normalisation."""
