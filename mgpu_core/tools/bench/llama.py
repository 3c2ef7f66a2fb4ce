"""The Llama of the `tensor_parallel` case, and processes that hold a part of it by transformers' own plan."""

import os
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from mgpu_core.support.extras import require
from mgpu_core.tools.bench.gloo_worker import WorkerConfig

WORDS, HEADS, LENGTH, NEW = 1000, 8, 64, 16


@dataclass(frozen=True)
class LlamaTask:
    """The model and the batch that all contestants compute.

    Attributes:
        layers, width: of the model.
        batch: rows of 64 tokens.
        what: ``step``, a forward and a backward; or ``generate``, 16 new tokens for each row.
    """

    layers: int
    width: int
    batch: int
    what: str

    def network(self) -> Any:
        """Return a fresh model, always with the same weights."""
        library = _transformers()
        config = library.LlamaConfig(
            vocab_size=WORDS, hidden_size=self.width, intermediate_size=4 * self.width, num_hidden_layers=self.layers,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return library.LlamaForCausalLM(config)

    def tokens(self, salt: int) -> torch.Tensor:
        """Random tokens, others for each salt."""
        return torch.randint(3, WORDS, (self.batch, LENGTH), generator=torch.Generator().manual_seed(salt))

    def compute(self, call: Any, generate: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of a step, whose backward has run, or the texts."""
        if self.what == "generate":
            with torch.no_grad():
                texts: torch.Tensor = generate(tokens, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
            return texts
        output = call(input_ids=tokens, labels=tokens, use_cache=False)
        output.loss.backward()
        logits: torch.Tensor = output.logits
        return logits.detach()

    def wrong(self, computed: torch.Tensor, salt: int) -> int:
        """Return how many values are not those of the model alone."""
        net = self.network()
        wanted = self.compute(net, net.generate, self.tokens(salt))
        return int((~torch.isclose(computed, wanted, rtol=1e-3, atol=1e-4)).sum())


def _transformers() -> Any:
    library: Any = require("transformers", "the case tensor_parallel")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@cache
def saved(task: LlamaTask) -> tempfile.TemporaryDirectory[str]:
    """Return a folder with the model, which goes at the end of the process."""
    folder = tempfile.TemporaryDirectory(prefix="mgpu-llama-")
    task.network().save_pretrained(folder.name)
    return folder


class OwnPart:
    """A process with a part of the model, by transformers' plan over torch.distributed."""

    def __init__(self, config: WorkerConfig) -> None:
        os.environ.update(RANK=str(config.rank), LOCAL_RANK=str(config.rank), WORLD_SIZE=str(config.ranks))

    def prepare(self, task: LlamaTask, folder: str) -> None:
        """Read the part."""
        self._task, self._tokens = task, task.tokens(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the newer name of this argument
            self._net = _transformers().AutoModelForCausalLM.from_pretrained(Path(folder), tp_plan="auto")

    def run(self) -> float:
        """Return the seconds of one computation, from the barrier on."""
        self._net.zero_grad()
        distributed.barrier()
        begin = time.perf_counter()
        self._compute(self._tokens)
        return time.perf_counter() - begin

    def _compute(self, tokens: torch.Tensor) -> torch.Tensor:
        output = self._task.compute(self._net, self._net.generate, tokens)
        return output.full_tensor() if hasattr(output, "full_tensor") else output

    def wrong(self, salt: int) -> int:
        """Wrong values of this process."""
        return self._task.wrong(self._compute(self._task.tokens(salt)), salt)
