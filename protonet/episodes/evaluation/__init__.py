"""From settings to numbers: what an evaluation needs, its run, statistics, comparisons and reports."""
