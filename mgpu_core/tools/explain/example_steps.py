"""Two steps to try `mgpu simulate` with.  Their sizes are exact; their times are assumptions, not measurements.

The parameters are those of the nets, in float32; the buckets are filled from the last layer on, as a backward does.
The seconds are round numbers of the right order for one recent data-centre GPU, chosen so that both kinds of step are
there: one in which nothing but latency counts, and one with a hundred megabytes of gradients after a long backward.
"""

from __future__ import annotations

from mgpu_core.tools.explain.step_profile import Bucket, StepProfile

__all__ = ["EXAMPLES", "NOTE"]

NOTE = "The times of this example are assumptions for illustration, not measurements."

_MIB = 1 << 20

EXAMPLES = {
    # 784-128-10 with biases: 101,770 parameters; 64 rows of 28 x 28 floats and an int64 target.  Between its layers are
    # 128 floats a row.
    "simplenet": StepProfile(
        name="SimpleNet (example)",
        ranks=1,
        rows=64,
        forward_seconds=100e-6,
        backward_seconds=200e-6,
        update_seconds=50e-6,
        scatter_nbytes=64 * (28 * 28 * 4 + 8),
        gather_nbytes=0,
        buckets=(Bucket(4 * 101_770, 1.0),),
        host_overhead_seconds=50e-6,
        host_forward_seconds=100e-6,
        host_backward_seconds=150e-6,
        border_nbytes=64 * 128 * 4,
    ),
    # 25,557,032 parameters; 64 rows of 3 x 224 x 224 floats and an int64 target.  The largest value between two of its
    # blocks has 256 x 56 x 56 floats a row.
    "resnet50": StepProfile(
        name="ResNet-50 (example)",
        ranks=1,
        rows=64,
        forward_seconds=25e-3,
        backward_seconds=50e-3,
        update_seconds=1e-3,
        scatter_nbytes=64 * (3 * 224 * 224 * 4 + 8),
        gather_nbytes=0,
        buckets=(
            Bucket(25 * _MIB, 0.2),
            Bucket(25 * _MIB, 0.4),
            Bucket(25 * _MIB, 0.7),
            Bucket(4 * 25_557_032 - 75 * _MIB, 1.0),
        ),
        host_overhead_seconds=0.5e-3,
        host_forward_seconds=12e-3,
        host_backward_seconds=12e-3,
        border_nbytes=64 * 256 * 56 * 56 * 4,
    ),
}
