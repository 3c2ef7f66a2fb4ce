"""The ladder: three kernels, each written four times, every time a little better, in three languages.

For reading and for measuring; the package does not import it. `README.md` beside this file explains the rungs, and
`python benchmarks/ladder/run.py` checks and times them.
"""
