"""The reference training: MNIST with a small perceptron or a small CNN, on no GPU, one, or many.

`mgpu mnist`, tests and benchmarks run it: `from mgpu_core.mnist.train import train`, then
`history = train(Config(model="cnn", epochs=2))`.
"""

from mgpu_core.mnist.config import Config
from mgpu_core.mnist.digits import Digits, Split, load
from mgpu_core.mnist.history import Epoch, History
from mgpu_core.mnist.loop import Training
from mgpu_core.mnist.model import Cnn, SimpleNet, build_model
from mgpu_core.mnist.report import ConsoleReport, Report

__all__ = [
    "Cnn",
    "Config",
    "ConsoleReport",
    "Digits",
    "Epoch",
    "History",
    "Report",
    "SimpleNet",
    "Split",
    "Training",
    "build_model",
    "load",
]
