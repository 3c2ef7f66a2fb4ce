"""Cases of one question each, which only a checkout has: `run.py` runs them like those of `mgpu bench`."""
