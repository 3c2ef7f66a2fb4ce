"""The reference training: MNIST with a small perceptron or a small CNN, on no GPU, one, or many.

`mgpu mnist`, tests and benchmarks run it: `from mgpu_core.tools.mnist.train import train`, then
`training = train(Config(model="cnn", epochs=2))`, which has `net` and `epochs`.
"""

from mgpu_core.tools.mnist.checkpoint import Epoch
from mgpu_core.tools.mnist.config import Config
from mgpu_core.tools.mnist.digits import Digits, Split, load
from mgpu_core.tools.mnist.model import Cnn, SimpleNet, build_model
from mgpu_core.tools.mnist.train import Training

__all__ = ["Cnn", "Config", "Digits", "Epoch", "SimpleNet", "Split", "Training", "build_model", "load"]
