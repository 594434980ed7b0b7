"""The regression suite's own code: what it measures, what it checks without a GPU, how it reports. Not imported by treemla."""
