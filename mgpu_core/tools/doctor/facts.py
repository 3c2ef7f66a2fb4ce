"""The findings of doctor about each part of the machine, as plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Python:
    """The interpreter; a free-threaded build may still run with the GIL on."""

    version: str
    free_threaded: bool
    gil_enabled: bool


@dataclass(frozen=True, slots=True)
class Torch:
    """torch itself; every field is empty when it does not import.

    `accelerator` is the kind of device that `torch.accelerator` takes, and `accelerator_count` how many it sees.
    """

    version: str | None = None
    cuda: str | None = None
    num_threads: int | None = None
    cuda_initialised: bool = False
    hip: str | None = None
    accelerator: str | None = None
    accelerator_count: int = 0


@dataclass(frozen=True, slots=True)
class Defaults:
    """The default devices of ranks, as torch writes them; `problem` says why there is no answer."""

    devices: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend of the core; `detail` describes it, or says why it is missing."""

    name: str
    built: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Core:
    """The compiled core; CUDA versions as CUDA writes them (13000 is 13.0), 0 where there is none."""

    backends: tuple[Backend, ...] = ()
    cuda_runtime: int = 0
    cuda_driver: int = 0
    cuda_device_count: int = 0

    @property
    def has_cuda(self) -> bool:
        """True if this build has the CUDA backend."""
        return any(backend.name == "cuda" and backend.built for backend in self.backends)


@dataclass(frozen=True, slots=True)
class Cpu:
    """Cores of the machine and those this process may use; memory in bytes, None where the system does not say."""

    cores: int
    cores_available: int
    memory_total: int | None
    memory_available: int | None
