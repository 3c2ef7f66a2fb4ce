"""Benchmarks of mgpu_core against its peers; `python benchmarks/run.py --list` says which."""
