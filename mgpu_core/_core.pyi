"""The compiled half: plans, transfers and collectives over raw pointers.  Compared with the module by a test."""

class Error(RuntimeError): ...
class BackendUnavailable(Error): ...

class CudaError(Error):
    code: int

class NcclError(Error):
    code: int

# The machine.
def backends() -> list[tuple[str, bool, str]]: ...
def num_threads() -> int: ...
def set_num_threads(threads: int) -> None: ...
def cuda_device_count() -> int: ...
def cuda_runtime_version() -> int: ...
def cuda_driver_version() -> int: ...
def cuda_has_code_for(device: int) -> bool: ...
def cuda_check_memory(pointer: int, device: int, name: str) -> None: ...
def cuda_allow_peers(device_and_peer: list[tuple[int, int]]) -> None: ...

# Counters: (operation, algorithm, rank) -> (calls, bytes).
def counters() -> dict[tuple[str, str, int], tuple[int, int]]: ...
def reset_counters() -> None: ...
def count(operation: str, algorithm: str, rank: int, nbytes: int) -> None: ...

# Transcripts of this thread.  A tuple per copy and sum: whether it sums, sources, targets, bytes of each, number of its
# call, stream, begin and end by CLOCK_MONOTONIC in ns.
def open_transcript() -> None: ...
def close_transcript() -> list[tuple[bool, list[int], list[int], int, int, tuple[int, int], int, int]]: ...

# Both ends of a `with` block that does nothing; they take what Python gives them.
def enter_nothing() -> None: ...
def leave_nothing(kind: object, error: object, traceback: object) -> None: ...

# Around work that one caller does at a time: a RuntimeError with these words for another, who comes meanwhile.
class Turn:
    def __init__(self, refusal: str) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...

# What Python objects are: entries of lists and dicts, attributes, and what calls return; and whether they are the same.

# Plans.
def chunk_plan(count: int, ranks: int) -> list[tuple[int, int]]: ...
def share_plan(count: int, shares: list[float]) -> list[tuple[int, int]]: ...
def bucket_plan(nbytes: list[int], kinds: list[int], limit_nbytes: int) -> list[list[int]]: ...
def ring_schedule(ranks: int) -> list[list[tuple[int, int, int, bool]]]: ...
def tree_schedule(ranks: int) -> list[list[tuple[int, int, int, bool]]]: ...

# A stream: (device, handle).  Device -1 is the host, whose work is done when a call returns.

# Transfers.  whole: (pointer, outer, rows, inner_nbytes); parts: (pointer, rows).
def scatter(
    whole: tuple[int, int, int, int],
    from_: tuple[int, int],
    parts: list[tuple[int, int]],
    streams: list[tuple[int, int]],
) -> None: ...
def gather(
    parts: list[tuple[int, int]],
    streams: list[tuple[int, int]],
    whole: tuple[int, int, int, int],
    to: tuple[int, int],
) -> None: ...

# Kernels.  pieces: (pointer, begin, count); flat: parameters, gradients, count, dtype, segments, how many,
# constants (float64, segments x optimizer_constants(); 0 on the host), groups, how many,
# clip, loss_scale, found_inf (0: none).
def optimizer_constants() -> int: ...
def gather_rows(
    rows: tuple[int, int, int],
    index: tuple[int, int],
    scale: float,
    shift: float,
    out: int,
    out_dtype: str,
    stream: tuple[int, int],
) -> None: ...
def pack(
    pieces: list[tuple[int, int, int]], dtype: str, flat: int, flat_dtype: str, scale: float, stream: tuple[int, int]
) -> None: ...
def unpack(
    pieces: list[tuple[int, int, int]], dtype: str, flat: int, flat_dtype: str, scale: float, stream: tuple[int, int]
) -> None: ...
def sum_ranks(in_: list[int], out: list[int], count: int, dtype: str, op: str, stream: tuple[int, int]) -> None: ...
def scale_cast(
    in_: int, in_dtype: str, out: int, out_dtype: str, count: int, scale: float, stream: tuple[int, int]
) -> None: ...
def norm_tiles(pieces: list[tuple[int, int, int]]) -> int: ...
def l2_norm(
    pieces: list[tuple[int, int, int]], dtype: str, partials: int, out: int, out_dtype: str, stream: tuple[int, int]
) -> None: ...
def sgd(
    flat: tuple[int, int | list[int], int, str, int, int, int, int, int, int, int, int],
    momentum: int,
    stream: tuple[int, int],
) -> None: ...
def adam(
    flat: tuple[int, int | list[int], int, str, int, int, int, int, int, int, int, int],
    exp_avg: int,
    exp_avg_sq: int,
    max_exp_avg_sq: int,
    decoupled: bool,
    stream: tuple[int, int],
) -> None: ...
def lion(
    flat: tuple[int, int | list[int], int, str, int, int, int, int, int, int, int, int],
    exp_avg: int,
    stream: tuple[int, int],
) -> None: ...

# Collectives: one pointer and one stream per rank.
def all_reduce(
    in_: list[int],
    out: list[int],
    count: int,
    dtype: str,
    op: str,
    algorithm: str,
    streams: list[tuple[int, int]],
    merge_shared_devices: bool,
) -> str: ...
def reduce(
    in_: list[list[int]],
    out: list[int],
    counts: list[int],
    dtype: str,
    op: str,
    streams: list[tuple[int, int]],
    root: tuple[int, int],
) -> None: ...
def broadcast(
    in_: list[int],
    out: list[list[int]],
    nbytes: list[int],
    root: tuple[int, int],
    streams: list[tuple[int, int]],
) -> None: ...
def all_gather(in_: list[int], in_nbytes: list[int], out: list[int], streams: list[tuple[int, int]]) -> None: ...
def reduce_scatter(
    in_: list[int], out: list[int], count: int, dtype: str, op: str, streams: list[tuple[int, int]]
) -> None: ...

# NCCL: a team owns the communicators of this process's ranks; its calls are those above, by NCCL.
def nccl_open(candidates: list[str]) -> int: ...
def nccl_version() -> int: ...
def nccl_unique_id() -> bytes: ...
def nccl_init(unique_id: bytes, world: int, ranks: list[int], devices: list[int], limit_seconds: float) -> NcclTeam: ...

class NcclTeam:
    def all_reduce(
        self,
        in_: list[int],
        out: list[int],
        count: int,
        dtype: str,
        op: str,
        streams: list[tuple[int, int]],
        merge_shared_devices: bool,
    ) -> None: ...
    def reduce(
        self,
        in_: list[list[int]],
        out: list[int],
        counts: list[int],
        dtype: str,
        op: str,
        streams: list[tuple[int, int]],
        root: tuple[int, int],
    ) -> None: ...
    def broadcast(
        self,
        in_: list[int],
        out: list[list[int]],
        nbytes: list[int],
        root: tuple[int, int],
        streams: list[tuple[int, int]],
    ) -> None: ...
    def all_gather(
        self, in_: list[int], in_nbytes: list[int], out: list[int], streams: list[tuple[int, int]]
    ) -> None: ...
    def reduce_scatter(
        self, in_: list[int], out: list[int], count: int, dtype: str, op: str, streams: list[tuple[int, int]]
    ) -> None: ...
    def exchange(
        self,
        sends: list[tuple[int, int, int, int, str]],
        receives: list[tuple[int, int, int, int, str]],
        streams: list[tuple[int, int]],
    ) -> None: ...
    def check(self) -> None: ...
    def wait(self, streams: list[tuple[int, int]]) -> None: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
