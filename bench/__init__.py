"""Measurements: ratios of alternatives timed in turn in the same run, never single times."""
