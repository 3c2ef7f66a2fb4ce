"""The names of the ladder: kernels, rungs and languages, and in a line each what a rung changed.

The same four steps for every kernel, so that what is learned on one is recognised on the next: first the memory
accesses of neighbouring threads, then the width of an access, and last the number of times that memory is crossed.
"""

KERNELS = ("pack", "sum_ranks", "gather_rows")
RUNGS = ("naive", "coalesced", "vectorised", "fused")
LANGUAGES = ("cuda", "cupy", "numba")

CHANGED = {
    "pack": {
        "naive": "a launch per tensor and one to cast; 32 neighbours a thread",
        "coalesced": "neighbouring threads, neighbouring elements",
        "vectorised": "16 bytes an access (numba: 8)",
        "fused": "one launch and one pass, cast inside; 4 loads in flight",
    },
    "sum_ranks": {
        "naive": "a launch per rank; 32 neighbours a thread",
        "coalesced": "neighbouring threads, neighbouring elements",
        "vectorised": "16 bytes an access (numba: 8)",
        "fused": "one launch reads all ranks, the sum stays in registers",
    },
    "gather_rows": {
        "naive": "pick, then normalise; a thread per row",
        "coalesced": "a block per row, a thread per byte",
        "vectorised": "16 bytes an access (numba: 8)",
        "fused": "one launch and one pass; 4 rows in flight",
    },
}
"""What each rung changed, against the one before it."""


class Unavailable(Exception):
    """A language, or one rung of it, cannot be had here; the message says why."""
