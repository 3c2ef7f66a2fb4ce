"""The examples of docs/serving.md: each runs as a process of its own, answers as the net does, and leaves no process.

A batch of the servers leaves when eight rows are there and no earlier, so that eight requests are answered only if all
of them wait in the Predictor at once.
"""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fakes import accelerator

from mgpu_core.tools.mnist import digits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(accelerator.is_wanted(), reason="servers have processes of their own, without the fake"),
]

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "serving.md").read_text()
ON_THE_PAGE = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))
FILES = ON_THE_PAGE | {"serve.py": (DOCS / "examples" / "serve.py").read_text()}
THREADS, ROUNDS = 8, 5
FULL_BATCHES = f"max_batch={THREADS}, max_wait_ms=60_000)"
MARK = "MGPU_TEST_SERVING"


def net():
    space = {"torch": torch}
    for text in ON_THE_PAGE.values():
        (function,) = re.findall(r"^def trained.*?\n(?=\n)", text, flags=re.MULTILINE | re.DOTALL)
        exec(function, space)
    with torch.device("cpu"):
        return space["trained"]()


def wanted(x):
    with torch.no_grad():
        return net()(x)


def free_port():
    """Return a port below those that the system gives to connections, one of which could take it meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port


def write(folder, name, *changes):
    """Write an example's file, with changes that it must have room for."""
    text = FILES[name]
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / name).write_text(text)


def processes_with(mark):
    """Return the processes that have the mark in their environment, other than those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def started(folder, *command, end=signal.SIGTERM):
    """Run Python with these arguments; at the end no process of it may be left."""
    mark = uuid.uuid4().hex
    own = {MARK: mark, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled"}
    own |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(folder)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env={**os.environ, **own}, stdout=log, stderr=log
        )
    try:
        yield process
        process.send_signal(end)
        process.wait(40)
        until = time.monotonic() + 20
        while processes_with(mark) and time.monotonic() < until:
            time.sleep(0.1)
        assert processes_with(mark) == []
    except BaseException:
        print((folder / "log").read_text()[-5000:])
        raise
    finally:
        for left in processes_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        process.wait(10)


def wait_for(url, process, *, answer):
    """Ask until the server gives this answer."""
    httpx = pytest.importorskip("httpx")
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert process.poll() is None, "the server has ended"
        with contextlib.suppress(httpx.HTTPError):
            if answer in httpx.get(url, timeout=5).text:
                return
        time.sleep(0.2)
    raise TimeoutError(url)


def answers(url, rows, to_json, from_json):
    """Send rounds of requests, one from each thread at a time; yield each answer, in order."""
    httpx = pytest.importorskip("httpx")

    def answer(x):
        response = httpx.post(url, json=to_json(x.tolist()), timeout=30)
        response.raise_for_status()
        return torch.tensor(from_json(response.json()), device="cpu")

    with ThreadPoolExecutor(THREADS) as pool:
        for xs in rows:
            yield from pool.map(answer, xs)


def ask(url, to_json, from_json):
    """Compare each answer with the net's."""
    rows = torch.randn(ROUNDS, THREADS, 1, 8, device="cpu")
    for x, found in zip(rows.flatten(0, 1), answers(url, rows, to_json, from_json), strict=True):
        assert torch.allclose(found, wanted(x), atol=1e-5)


def same(value):
    return value


def test_the_page_has_these_examples():
    assert list(ON_THE_PAGE) == ["lit.py", "data.py", "cluster.py"]
    assert "{literalinclude} examples/serve.py" in PAGE


def test_fastapi(tmp_path):
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package)
    httpx = pytest.importorskip("httpx")
    write(tmp_path, "serve.py", ("Predictor(net, device_ids)", f"Predictor(net, device_ids, {FULL_BATCHES}"))
    url = f"http://127.0.0.1:{(port := free_port())}"
    with started(tmp_path, "serve.py", "--ranks", "2", "--port", str(port)) as process:
        wait_for(f"{url}/metrics", process, answer="mgpu_requests_total")
        count = ROUNDS * THREADS
        ((images, labels),) = digits.load().test.batches(torch.arange(count, device="cpu"), count)
        rows = images.reshape(ROUNDS, THREADS, 1, 784)
        found = torch.cat(list(answers(f"{url}/predict", rows, same, same)))
        assert (found.argmax(1) == labels).sum() >= 0.8 * count
        metrics = httpx.get(f"{url}/metrics", timeout=10)
        assert metrics.headers["content-type"].startswith("text/plain")
        for name, number in (("requests", count), ("batches", ROUNDS), ("failures", 0)):
            values = re.findall(rf"^mgpu_{name}_total\{{.*\}} (\d+)$", metrics.text, flags=re.MULTILINE)
            assert sum(map(int, values)) == number
        assert len(httpx.get(f"{url}/example", timeout=10).json()[0]) == 784
    told = (tmp_path / "log").read_text()
    losses = [float(loss) for loss in re.findall(r": loss (\d+\.\d+)", told)]
    assert losses[-1] < losses[0] / 2


def test_litserve(tmp_path):
    pytest.importorskip("litserve")
    port = free_port()
    full_batches = ("trained(), devices)", f"trained(), devices, {FULL_BATCHES}")
    write(tmp_path, "lit.py", full_batches, ("port=8001", f"port={port}"))
    url = f"http://127.0.0.1:{port}"
    with started(tmp_path, "lit.py", end=signal.SIGINT) as process:
        wait_for(f"{url}/health", process, answer="ok")
        ask(f"{url}/predict", lambda rows: {"rows": rows}, lambda answer: answer["scores"])


def test_ray_data(tmp_path):
    pytest.importorskip("ray.data")
    numpy, parquet = pytest.importorskip("numpy"), pytest.importorskip("pyarrow.parquet")
    write(tmp_path, "data.py")
    with started(tmp_path, "data.py") as process:
        assert process.wait(150) == 0
    table = parquet.read_table(tmp_path / "scores")
    x, scores = (torch.tensor(numpy.array(table[name].to_pylist()), device="cpu") for name in ("data", "scores"))
    assert x.shape == (1000, 8)
    assert torch.allclose(scores, wanted(x), atol=1e-5)


RUN_ON_A_PORT = """
import ray
from ray import serve
from cluster import app
ray.init(num_cpus=3, include_dashboard=False)
serve.start(http_options={"port": %d})
serve.run(app, blocking=True)
"""


def test_ray_serve(tmp_path):
    pytest.importorskip("ray.serve")
    write(tmp_path, "cluster.py", ("trained(), devices)", f"trained(), devices, {FULL_BATCHES}"))
    port = free_port()
    (tmp_path / "run.py").write_text(RUN_ON_A_PORT % port)
    url = f"http://127.0.0.1:{port}"
    with started(tmp_path, "run.py", end=signal.SIGINT) as process:
        wait_for(f"{url}/-/routes", process, answer="default")
        ask(url, same, same)


ON_TWO_NODES = """
import numpy
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

from cluster import app
from data import NODES, PER_NODE, Predict

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": True})
cluster.add_node(num_cpus=3)
ray.init(address=cluster.address)


class Where(Predict):
    def __call__(self, batch):
        node = ray.get_runtime_context().get_node_id()
        return super().__call__(batch) | {"node": numpy.array([node] * len(batch["data"]))}


rows = ray.data.from_numpy(numpy.zeros((1000, 8), numpy.float32)).repartition(20)
pool = ray.data.ActorPoolStrategy(size=NODES)
found = rows.map_batches(Where, batch_size=50, compute=pool, **PER_NODE).take_all()
print("rows:", len(found), "nodes:", len({row["node"] for row in found}))

serve.start(http_options={"location": "NoServer"})
serve.run(app)
replicas = list_actors(filters=[("class_name", "=", "ServeReplica:default:Predict"), ("state", "=", "ALIVE")])
print("replicas:", len(replicas), "nodes:", len({each.node_id for each in replicas}))
serve.shutdown()
ray.shutdown()
cluster.shutdown()
"""


def test_ray_starts_one_predictor_per_node(tmp_path):
    pytest.importorskip("ray.serve")
    pytest.importorskip("ray.data")
    for name in ("data.py", "cluster.py"):
        write(tmp_path, name, ("NODES = 1", "NODES = 2"))
    (tmp_path / "run.py").write_text(ON_TWO_NODES)
    with started(tmp_path, "run.py") as process:
        assert process.wait(150) == 0
    told = (tmp_path / "log").read_text()
    assert re.search(r"^replicas: 2 nodes: 2$", told, flags=re.MULTILINE)
    assert re.search(r"^rows: 1000 nodes: [12]$", told, flags=re.MULTILINE)  # a fast actor may answer all
