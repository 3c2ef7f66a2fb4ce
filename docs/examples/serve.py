"""Digits over HTTP: FastAPI takes the requests, a Predictor joins them into batches.

    pip install '.[serving]'  # in a clone
    python docs/examples/serve.py
    python docs/examples/serve.py --ranks 2  # two ranks on the CPU

    curl -s localhost:8000/example | curl localhost:8000/predict --json @-
    curl localhost:8000/metrics

The first uses all GPUs, or MGPU_CORE_CPU_RANKS ranks on the CPU.
"""

import argparse
from contextlib import asynccontextmanager

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from torch import nn

import mgpu_core
from mgpu_core.tools.mnist import digits

EPOCHS, BATCH = 5, 64


def trained(data, device_ids):
    """Train a small net in seconds, in place of a checkpoint."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    if device_ids is None and torch.accelerator.is_available():
        net.to(torch.accelerator.current_accelerator())
    optimizer = mgpu_core.optim.AdamW(net.parameters(), lr=2e-3)
    step = mgpu_core.TrainStep(net, nn.functional.cross_entropy, optimizer, device_ids)
    print(f"{len(step.plan())} ranks")
    for epoch in range(EPOCHS):
        order = torch.randperm(data.count)
        losses = [float(step(*batch)) for batch in data.batches(order, BATCH)]
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}", flush=True)
    step.close()
    return net


@asynccontextmanager
async def lifespan(app):
    device_ids, data = app.state.device_ids, digits.load()
    net = trained(data.train, device_ids)
    ((images, _),) = data.test.batches(torch.arange(1), 1)
    app.state.example = images.flatten(1).tolist()
    with mgpu_core.Predictor(net, device_ids) as app.state.predict:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
async def predict(rows: list[list[float]]) -> list[list[float]]:
    scores = await app.state.predict.asubmit(torch.tensor(rows))
    return scores.tolist()


@app.get("/example")
def example() -> list[list[float]]:
    return app.state.example


@app.get("/metrics", response_class=PlainTextResponse)
def metrics() -> str:
    return app.state.predict.stats().prometheus()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, help="ranks on the CPU (default: whatever there is)"
    )
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    app.state.device_ids = None if options.ranks is None else ["cpu"] * options.ranks
    uvicorn.run(app, port=options.port)


if __name__ == "__main__":
    main()
