"""Faults put into the package on purpose, one at a time, to see that the tests notice.

A suite that passes says little until it has been seen to fail.  Each mutant below is a mistake that somebody could
make: a few characters replaced in a copy of the package, or of the C++ sources.  The tests named with it must then
fail.

    python tests/mutants.py                 all of them
    python tests/mutants.py --only NAME     some
    python tests/mutants.py --table         and write docs/mutants.md

The exit status is 1 if a mutant survives.  A mutant whose text is no longer found is an error: fix its entry.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "mutants.md"


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong.
        path: the file, below the root of the repository.
        changes: (old, new) texts; each old one is there exactly once.
        tests: what must fail: files for pytest below tests/ (those in accelerator/ on the fake accelerator), or the
            name of a C++ test program, after "ptx" where it runs the kernels' PTX.
    """

    name: str
    path: str
    changes: tuple[tuple[str, str], ...]
    tests: str

    @property
    def program(self) -> str:
        """The C++ test program."""
        return self.tests.removeprefix("ptx ")

    @property
    def is_cpp(self) -> bool:
        """Whether the C++ sources are changed."""
        return self.path.startswith("csrc/")

    def text(self, root: Path) -> str:
        """The file with the fault.

        Raises:
            ValueError: an old text is not there, or more than once.
        """
        text = (root / self.path).read_text()
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: found {text.count(old)} times in {self.path}: {old!r}")
            text = text.replace(old, new)
        return text


def mutant(name: str, path: str, old: str, new: str, tests: str, *more: tuple[str, str]) -> Mutant:
    """A mutant in a line."""
    return Mutant(name, path, ((old, new), *more), tests)


STALE = """

_stale = {}


def _remembered(tensors, team, detach):
    key = (id(tensors[0]) if tensors else 0, len(team), detach, tuple(tensor._version for tensor in tensors))
    return _stale.setdefault(key, None) or _stale.update({key: _copy_tensors(tensors, team, detach)}) or _stale[key]
"""

GATHERED = "rows = [(part.data_ptr(), part.shape[dim]) for part in parts]"

MUTANTS = [
    # The rows.
    mutant(
        "chunks are cut by ceiling",
        "mgpu_core/parallel/scatter/rows.py",
        "tuple(count for _, count in plan if count) or (0,)",
        "tuple(max(0, min(-(-rows // ranks), rows - r * -(-rows // ranks))) for r in range(ranks))",
        "parallel/test_scatter.py",
    ),
    mutant(
        "shares are ignored",
        "mgpu_core/parallel/scatter/rows.py",
        "if shares is None else _core.share_plan(rows, list(shares))",
        "if True else plan",
        "parallel/test_scatter.py",
    ),
    mutant(
        "rows that do not fit are dropped in silence",
        "mgpu_core/parallel/scatter/arguments.py",
        "elif _rows_of(leaf, dim) != _rows_of(self.leaves[first], dim):",
        "elif False:",
        "parallel/test_scatter.py",
    ),
    mutant(
        "ranks without rows run too",
        "mgpu_core/parallel/scatter/rows.py",
        "tuple(count for _, count in plan if count) or (0,)",
        "tuple(count for _, count in plan)",
        "parallel/test_scatter.py",
    ),
    mutant(
        "a replicated tensor is the caller's own on rank 0",
        "mgpu_core/parallel/scatter/whole.py",
        "copies[0] = copies[0].clone()",
        "pass",
        "parallel/test_scatter.py",
    ),
    mutant(
        "parts are gathered in reverse",
        "mgpu_core/comm/dispatch.py",
        GATHERED,
        GATHERED.replace("parts]", "parts][::-1]"),
        "parallel/test_gather.py",
    ),
    mutant(
        "unequal leaves are gathered as rank 0's",
        "mgpu_core/parallel/gather.py",
        "if other is None:",
        "if True:",
        "parallel/test_gather.py",
    ),
    mutant(
        "the output device is forgotten with one device",
        "mgpu_core/data_parallel.py",
        "return self.gather([output], self.output_device)",
        "return output",
        "test_data_parallel_contract.py",
    ),
    # The gradients.
    mutant(
        "gradients are averaged, not added: a mean of means",
        "mgpu_core/comm/autograd.py",
        'dispatch.reduce_batch([rows[i] for i in present], "sum", device)',
        'dispatch.reduce_batch([rows[i] for i in present], "avg", device)',
        "comm/test_autograd.py",
    ),
    mutant(
        "rank 2's gradient is dropped",
        "mgpu_core/comm/autograd.py",
        "rows = [grads[i::tensors] for i in range(tensors)]",
        "rows = [tuple(g for r, g in enumerate(grads[i::tensors]) if r != 2) for i in range(tensors)]",
        "test_data_parallel_contract.py",
    ),
    mutant(
        "all buckets but the first lose their gradients",
        "mgpu_core/comm/autograd.py",
        "result[rank][i] = copy",
        "result[rank][i] = copy if place == 0 else copy.detach()",
        "comm/test_autograd.py",
    ),
    mutant(
        "unused parameters get zeros",
        "mgpu_core/comm/autograd.py",
        "ctx.set_materialize_grads(False)  # a parameter",
        "pass  # a parameter",
        "comm/test_autograd.py",
    ),
    mutant(
        "buckets keep the engine's lowest priority",
        "mgpu_core/comm/autograd.py",
        "node._set_sequence_nr(number)",
        "pass",
        "comm/test_autograd.py",
    ),
    mutant(
        "an average is a sum",
        "mgpu_core/comm/algorithms.py",
        "pointers, pointers, self.count, self.dtype, self.op, algorithm, self",
        'pointers, pointers, self.count, self.dtype, self.op.replace("avg", "sum"), algorithm, self',
        "conformance/test_collectives.py",
    ),
    mutant(
        "the last three elements are lost",
        "mgpu_core/comm/algorithms.py",
        "pointers, pointers, self.count, self.dtype, self.op, algorithm, self",
        "pointers, pointers, max(self.count - 3, 0), self.dtype, self.op, algorithm, self",
        "conformance/test_collectives.py",
    ),
    mutant(
        "half precision is rounded after every rank",
        "mgpu_core/comm/torch_backend.py",
        "wide = torch.float32 if parts[0].dtype in _HALF else parts[0].dtype",
        "wide = parts[0].dtype",
        "conformance/test_collectives.py",
    ),
    mutant(
        "autograd does not hear of writes",
        "mgpu_core/device/memory.py",
        "_increment_version(tensors)",
        "pass",
        "comm/test_refusals.py",
    ),
    mutant(
        "a leaf that requires grad is written",
        "mgpu_core/device/tensor_checks.py",
        "if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():",
        "if False:",
        "comm/test_refusals.py",
    ),
    mutant(
        "a conjugated view is read as it lies",
        "mgpu_core/device/tensor_checks.py",
        "    if tensor.is_conj():\n        tensor",
        "    if False:\n        tensor",
        "comm/test_refusals.py",
    ),
    # The replicas.
    mutant(
        "the last rank has the module's own tensors",
        "mgpu_core/comm/batches.py",
        "tensor if rank == 0 and device",
        "tensor if rank == len(devices) - 1 and device",
        "parallel/test_replicate.py",
    ),
    mutant(
        "rank 0 has rank 1's buffers",
        "mgpu_core/parallel/replicate.py",
        "copies[rank][split:], calls",
        "copies[max(rank, len(copies) > 1)][split:], calls",
        "parallel/test_replicate.py",
    ),
    mutant(
        "methods in attributes keep their replica alive",
        "mgpu_core/parallel/replicate.py",
        "module.__dict__[name] = _WeakMethod(method)",
        "pass",
        "test_data_parallel_contract.py",
    ),
    mutant(
        "lost attributes are warned of in every forward",
        "mgpu_core/data_parallel.py",
        "            self._forwards_to_watch = 0",
        "            self._forwards_to_watch = 3",
        "test_data_parallel_contract.py",
    ),
    # The ranks.
    mutant(
        "a worker's exception is swallowed",
        "mgpu_core/device/failures.py",
        "    if not errors:\n        return",
        "    if True:\n        return",
        "parallel/test_apply.py",
    ),
    mutant(
        "other ranks' failures are not told",
        "mgpu_core/device/failures.py",
        "error.add_note(",
        "str(",
        "parallel/test_apply.py",
    ),
    mutant(
        "grad mode is not passed on",
        "mgpu_core/device/context.py",
        "torch.set_grad_enabled(self._grad)",
        "torch.set_grad_enabled(True)",
        "parallel/test_apply.py",
    ),
    mutant(
        "inference mode is not passed on",
        "mgpu_core/device/context.py",
        "torch.inference_mode(self._inference)",
        "torch.inference_mode(False)",
        "parallel/test_apply.py",
    ),
    mutant(
        "autocast's dtype is not passed on",
        "mgpu_core/device/context.py",
        "torch.autocast(kind, dtype=dtype, ",
        "torch.autocast(kind, ",
        "parallel/test_apply.py",
    ),
    mutant(
        "contextvars are not passed on",
        "mgpu_core/device/context.py",
        "return variables.run(work)",
        "return work()",
        "parallel/test_apply.py",
    ),
    mutant(
        "saved-tensor hooks are not passed on",
        "mgpu_core/device/context.py",
        "if self._hooks is not None:",
        "if False:",
        "test_contexts.py",
    ),
    mutant(
        "ranks under a checkpoint do not take turns",
        "mgpu_core/parallel/apply.py",
        "turns = _turns(team, context.serialize, draws)",
        "turns = _turns(team, False, draws)",
        "test_contexts.py",
    ),
    mutant(
        "unsafe modes are let in",
        "mgpu_core/device/modes.py",
        "not getattr(mode, SAFE, False)",
        "False",
        "test_contexts.py",
    ),
    mutant(
        "all ranks draw the same numbers",
        "mgpu_core/device/random.py",
        "(base + rank * 0x9E3779B9)",
        "(base + 0 * rank)",
        "test_random_numbers.py",
    ),
    mutant(
        "ranks draw from one generator",
        "mgpu_core/parallel/apply.py",
        "if draws and team.devices.count(_CPU) > 1:",
        "if False:",
        "test_random_numbers.py",
    ),
    mutant(
        "a checkpoint saves the wrong generator's state",
        "mgpu_core/device/random.py",
        "_DefaultGenerator() if _askers[0] else torch.default_generator",
        "torch.default_generator",
        "test_random_numbers.py",
    ),
    mutant(
        "a rank waits for ever",
        "mgpu_core/device/workers.py",
        "self._nobody.get(timeout=seconds)",
        "self._nobody.get(timeout=30)",
        "parallel/test_apply.py",
    ),
    mutant(
        "the first rank to end counts for all",
        "mgpu_core/device/workers.py",
        "        if not self._at_work:\n            self._nobody",
        "        if True:\n            self._nobody",
        "parallel/test_apply.py",
    ),
    mutant(
        "a forked child keeps its parent's threads",
        "mgpu_core/device/workers.py",
        "        pool._forget()\n",
        "        pass\n",
        "device/test_workers.py",
    ),
    mutant(
        "a busy team's crew is lent twice",
        "mgpu_core/device/workers.py",
        "crew = self._idle.pop() if self._idle else None",
        "crew = self._idle[-1] if self._idle else None",
        "device/test_workers.py",
    ),
    # The training.
    mutant(
        "a resumed run forgets its random numbers",
        "mgpu_core/mnist/loop.py",
        "self._generator = checkpoint.generator",
        "pass",
        "mnist/test_checkpoint.py",
    ),
    mutant(
        "a damaged checkpoint is believed",
        "mgpu_core/mnist/checkpoint.py",
        "if damaged is not None:",
        "if False:",
        "mnist/test_checkpoint.py",
    ),
    # The step.
    mutant(
        "step: ranks are not weighted by their rows",
        "mgpu_core/train/loss.py",
        "return [self._scale * count / self._seeded for count in rows]",
        "return [self._scale / len(rows) / self._planned for count in rows]",
        "train/test_equality.py",
    ),
    mutant(
        "step: calls of a window are averaged, whatever their rows",
        "mgpu_core/train/loss.py",
        "factor *= self._seeded / weight",
        "factor *= 1",
        "train/test_train_step.py",
    ),
    mutant(
        "step: the weight of the last call counts alone",
        "mgpu_core/train/loss.py",
        "weight if self._weight is None else self._weight + weight",
        "weight",
        "train/test_train_step.py",
    ),
    mutant(
        "step: the loss scale is not taken out",
        "mgpu_core/train/loss.py",
        "factor = 1.0 / self._scale",
        "factor = 1.0",
        "train/test_amp.py",
    ),
    mutant(
        "step: recordings of too many kinds take turns",
        "mgpu_core/train/graph_cache.py",
        "if self._steps - self._last_used[oldest] <= IDLE:",
        "if False:",
        "train/test_graphs.py",
    ),
    mutant(
        "step: graphs of several devices add to the gradients before",
        "mgpu_core/train/cuda_graphs.py",
        "        steps.reducer.clear(steps.replicas.ranks_of[index])\n",
        "",
        "train/test_graphs.py",
    ),
    mutant(
        "step: graphs of several devices weigh every batch like the first",
        "mgpu_core/train/cuda_graphs.py",
        "weight.copy_(torch.as_tensor(total), non_blocking=True)",
        "pass",
        "train/test_graphs.py",
    ),
    mutant(
        "step: graphs of several devices do not sum over them",
        "mgpu_core/train/cuda_graphs.py",
        "        steps.reducer.buckets.add_up_all_devices()\n",
        "",
        "accelerator/test_graphs.py",
    ),
    mutant(
        "step: a failure between the graphs of several devices keeps running statistics",
        "mgpu_core/train/update.py",
        "if self._loss_scale.is_on or len(self._replicas.devices) > 1:",
        "if self._loss_scale.is_on:",
        "accelerator/test_graphs.py",
    ),
    mutant(
        "synchronised layers: a bias has a gradient where a weight has",
        "mgpu_core/sync_batchnorm/joint.py",
        "for each in (*weights, *biases)]",
        "for each in (*weights, *weights)]",
        "test_sync_batchnorm.py",
    ),
    mutant(
        "synchronised layers: a failure keeps what the forward has made",
        "mgpu_core/device/rendezvous.py",
        "                found.error = None\n",
        "",
        "test_sync_batchnorm.py",
    ),
    mutant(
        "what the torch backend gathers is part of a graph",
        "mgpu_core/comm/torch_backend.py",
        "@torch.no_grad()\ndef gather(",
        "def gather(",
        "comm/test_torch_backend.py",
    ),
    mutant(
        "kernels take a scalar's memory as it is",
        "mgpu_core/kernels/flat_optimizers.py",
        "None if each is None else as_tensor(each, name)",
        "each",
        "kernels/test_flat_optimizers.py",
    ),
    mutant(
        "step: a bucket is summed when the first rank is ready",
        "mgpu_core/train/reducer.py",
        "if self._ranks_missing[bucket] != 0:",
        "if self._ranks_missing[bucket] < 0:",
        "train/test_train_step.py",
    ),
    mutant(
        "step: a gradient that comes late is not added",
        "mgpu_core/train/reducer.py",
        "self._summed.discard(bucket)",
        "pass",
        "train/test_ready_counter.py",
    ),
    mutant(
        "step: buckets wait for the end of backward",
        "mgpu_core/train/reducer.py",
        "            if overlap:\n",
        "            if False:\n",
        "train/test_train_step.py",
    ),
    mutant(
        "step: sums do not wait for a stream of the module's own",
        "mgpu_core/train/reducer.py",
        "self._side.made_on_current(device)",
        "pass",
        "accelerator/test_streams.py",
    ),
    mutant(
        "step: what a recording launches was not launched before",
        "mgpu_core/train/cuda_graphs.py",
        "        warm_up(sums)\n",
        "",
        "accelerator/test_warm_graphs.py",
    ),
    mutant(
        "a side stream may be the user's",
        "mgpu_core/device/streams.py",
        "OWN_PRIORITY = -2",
        "OWN_PRIORITY = 0",
        "accelerator/test_streams.py",
    ),
    mutant(
        "a GPU's capture is asked of the current GPU",
        "mgpu_core/device/streams.py",
        "with torch.accelerator.device_index(gpu):",
        "if True:",
        "accelerator/test_as_cuda.py",
    ),
    mutant(
        "scatter's backward works on default streams",
        "mgpu_core/comm/autograd.py",
        "span(GATHER_BACK), _resumed(ctx.team, ctx.streams):",
        "span(GATHER_BACK):",
        "accelerator/test_streams.py",
    ),
    mutant(
        "backwards do not wait for the stream that autograd ordered",
        "mgpu_core/device/streams.py",
        "            if stream != current:\n                stream.wait_stream(current)",
        "            pass",
        "accelerator/test_streams.py",
    ),
    mutant(
        "step: gradients of the step before are added",
        "mgpu_core/train/update.py",
        "        self._gradients.clear()\n        self._buffers.take()",
        "        self._buffers.take()",
        "train/test_train_step.py",
    ),
    mutant(
        "step: close leaves the threads of smaller batches",
        "mgpu_core/device/team.py",
        "            part.close()",
        "            pass",
        "train/test_habits.py",
    ),
    mutant(
        "step: a failed step keeps its gradients",
        "mgpu_core/train/update.py",
        "        self._gradients.abandon()\n        self._buffers.restore()",
        "        self._buffers.restore()",
        "train/test_failures.py",
    ),
    mutant(
        "step: a failed step keeps its running statistics",
        "mgpu_core/train/update.py",
        "        self._gradients.abandon()\n        self._buffers.restore()",
        "        self._gradients.abandon()",
        "train/test_failures.py",
    ),
    mutant(
        "step: a failed step counts as accumulated",
        "mgpu_core/train/update.py",
        "        self._buffers.restore()\n        self.close()",
        "        self._buffers.restore()",
        "train/test_failures.py",
    ),
    mutant(
        "step: Ctrl-C may cut an update in two",
        "mgpu_core/train/rollback.py",
        "_signal.signal(_signal.SIGINT, self._keep)",
        "pass",
        "train/test_failures.py",
    ),
    mutant(
        "step: a NaN is trained on",
        "mgpu_core/train/grad_clip.py",
        "    if are_finite(gradients, norm):\n        return",
        "    return",
        "train/test_failures.py",
    ),
    mutant(
        "step: nothing is clipped",
        "mgpu_core/train/grad_clip.py",
        'if norm.device.type == "cpu" and coefficient >= 1:',
        "if True:",
        "train/test_train_step.py",
    ),
    mutant(
        "step: an overflow on one rank updates all the same",
        "mgpu_core/train/update.py",
        "if self._loss_scale.is_on and not are_finite(gradients, gradients.norm()):",
        "if False:",
        "train/test_amp.py",
    ),
    mutant(
        "step: a resumed run forgets its random numbers",
        "mgpu_core/train/checkpoint.py",
        "torch.set_rng_state(random)",
        "pass",
        "train/test_modules.py",
    ),
    # Several processes, and shards.
    mutant(
        "processes: the mean is over the process's own rows",
        "mgpu_core/train/update.py",
        "return tally.used, tally.weight",
        "return tally.used, self.window.weight",
        "processes/test_training.py",
    ),
    mutant(
        "processes: what others alone used is not updated",
        "mgpu_core/train/update.py",
        "return tally.used, tally.weight",
        "return self._gradients.used(), tally.weight",
        "processes/test_training.py",
    ),
    mutant(
        "processes: buckets leave as they become ready",
        "mgpu_core/processes/outbox.py",
        "            while self._next in self._ready and self._next < last:\n                self._send(self._next)",
        "            if bucket < last:\n                self._send(bucket)",
        "processes/test_training.py",
    ),
    mutant(
        "processes: nobody is told of a failure",
        "mgpu_core/train/process_sync.py",
        "if not self._is_open or self._processes.lost is not None:",
        "if True:",
        "processes/test_failures.py",
    ),
    mutant(
        "processes: each keeps the values that it had",
        "mgpu_core/processes/group.py",
        "if self.index == root:",
        "if True:",
        "processes/test_failures.py",
    ),
    mutant(
        "processes: those that differ train together",
        "mgpu_core/processes/agreement.py",
        "if at is not None:",
        "if False:",
        "processes/test_failures.py",
    ),
    mutant(
        "processes: a learning rate stands still where there is no data",
        "mgpu_core/train/process_sync.py",
        "            _take(group, given)\n        followed",
        "            pass\n        followed",
        "processes/test_join.py",
    ),
    mutant(
        "processes: a ballot is lost in half precision",
        "mgpu_core/processes/ballot.py",
        "words = ballot.weight,",
        "words = round(ballot.weight, -1),",
        "processes/test_ballot.py",
    ),
    mutant(
        "step: shares change with every step",
        "mgpu_core/train/balance.py",
        "if len(self._samples) < self._wait:",
        "if False:",
        "train/test_shares.py",
    ),
    mutant(
        "step: a split that is no faster stays",
        "mgpu_core/train/balance.py",
        "changed = self._has_failed() or self._consider(rows, room)",
        "changed = self._consider(rows, room)",
        "train/test_shares.py",
    ),
    mutant(
        "step: twins of an optimizer share one count of steps",
        "mgpu_core/train/optimizer_step.py",
        "clone.load_state_dict(copy.deepcopy(self._optimizer.state_dict()))",
        "clone.load_state_dict(self._optimizer.state_dict())",
        "accelerator/test_train_step.py",
    ),
    mutant(
        "containers: attributes with tensors of all rows come along",
        "mgpu_core/containers.py",
        "        if type(value) in (bool, int, float, str, type(None)):",
        "        if True:",
        "test_nested.py",
    ),
    mutant(
        "step: what is thawed stays outside the buckets",
        "mgpu_core/train/grad_buckets.py",
        "if self._replicas.own[i].requires_grad and (i not in self.bucket_of or i in updated()):",
        "if False:",
        "train/test_some_parameters.py",
    ),
    mutant(
        "step: what is frozen is laid out and summed",
        "mgpu_core/train/reducer.py",
        "if each.requires_grad or used[i] or i in known]",
        "if True]",
        "train/test_some_parameters.py",
    ),
    mutant(
        "step: what another optimizer updates is moved",
        "mgpu_core/train/grad_buckets.py",
        "[i for i in order if i in found.updated or processes is not None]",
        "order",
        "train/test_some_parameters.py",
    ),
    mutant(
        "step: its end moves what is another step's",
        "mgpu_core/train/replicas.py",
        "        for i in self._adopted:\n            self.own",
        "        for i in range(len(self.own)):\n            self.own",
        "train/test_some_parameters.py",
    ),
    mutant(
        "step: parameters that were moved stay on other devices what they were",
        "mgpu_core/train/replicas.py",
        "        self.send_values(moved)\n        self.moves",
        "        self.moves",
        "accelerator/test_train_step.py",
    ),
    mutant(
        "step: padding is multiplied by what is not finite",
        "mgpu_core/train/grad_clip.py",
        "                if not _is_known_finite(own) and padding",
        "                if False and padding",
        "train/test_failures.py",
    ),
    mutant(
        "sums: fewer rows are read as all",
        "mgpu_core/device/tensor_checks.py",
        "            and list(map(torch.Tensor.size, found)) == shapes\n",
        "",
        "comm/test_rank_sums.py",
    ),
    mutant(
        "optim: a gradient of another layout is read where it lies",
        "mgpu_core/device/tensor_checks.py",
        "            and list(map(torch.Tensor.stride, found)) == strides\n",
        "",
        "optim/test_against_torch.py",
    ),
    mutant(
        "optim: a missing gradient is taken for the parameter's last one",
        "mgpu_core/optim/optimizer.py",
        "        used = list(map(is_not, gradients, repeat(None)))\n",
        "        used = [True] * len(gradients)\n",
        "optim/test_against_torch.py",
    ),
    mutant(
        "step: the gradients of one rank of the call before stay",
        "mgpu_core/train/reducer.py",
        "            for parameter in row:\n                parameter.grad = None",
        "            for parameter in row[1:]:\n                parameter.grad = None",
        "train/test_one_rank.py",
    ),
    mutant(
        "module tree: renamed children are not seen",
        "mgpu_core/module_tree.py",
        "            list(chain(*tables)),\n",
        "            [],\n",
        "test_module_tree.py",
    ),
    mutant(
        "module tree: replaced tensors are not seen",
        "mgpu_core/module_tree.py",
        "            list(map(id, chain(*map(dict.values, tables)))),\n",
        "            [],\n",
        "test_module_tree.py",
    ),
    mutant(
        "module tree: methods in attributes are not seen",
        "mgpu_core/module_tree.py",
        "return self._found is not None and not self._found[-1] and self._find() == self._found",
        "return self._found is not None and self._find()[:-1] == self._found[:-1]",
        "test_module_tree.py",
    ),
    mutant(
        "step: parameters of a bucket share a storage",
        "mgpu_core/optim/flat_buffers.py",
        "{i: _with_own_storage(view) for i, view in self.views_of(self.values).items()}",
        "self.views_of(self.values)",
        "train/test_forward_habits.py",
    ),
    mutant(
        "scatter: rows that do not fit are one per rank",
        "mgpu_core/parallel/scatter/arguments.py",
        "leaf.numel() == leaf.size(dim) == ranks}",
        "leaf.size(dim) == ranks}",
        "parallel/test_scatter.py",
    ),
    mutant(
        "gather: entries of sets are paired as they come",
        "mgpu_core/parallel/gather.py",
        "isinstance(obj, Set) or not isinstance(obj, Iterable)",
        "not isinstance(obj, Iterable)",
        "parallel/test_gather.py",
    ),
    mutant(
        "containers: a constructor that takes all entries for its first is believed",
        "mgpu_core/containers.py",
        "list(made.keys()) == list(plain) and all(map(_is_entry, made.values(), plain.values()))",
        "list(made.keys()) == list(plain)",
        "test_nested.py",
    ),
    mutant(
        "memory: columns of one matrix are the same memory",
        "mgpu_core/device/shared_memory.py",
        "    if one.is_contiguous() and two.is_contiguous():\n        return True\n",
        "    return True\n",
        "comm/test_refusals.py",
    ),
    mutant(
        "memory: what lies between is not looked at closely",
        "mgpu_core/device/shared_memory.py",
        "return distance == 0",
        "return False",
        "device/test_shared_memory.py",
    ),
    mutant(
        "batch norm: who comes last decides whether there is a graph",
        "mgpu_core/sync_batchnorm/joint.py",
        "torch.set_grad_enabled(any(grad_modes))",
        "torch.set_grad_enabled(torch.is_grad_enabled())",
        "test_sync_batchnorm.py",
    ),
    mutant(
        "batch norm: a second derivative forgets the statistics",
        "mgpu_core/sync_batchnorm/joint.py",
        "if torch.is_grad_enabled():  #",
        "if False:  #",
        "test_sync_batchnorm.py",
    ),
    mutant(
        "batch norm: each rank normalises its own rows",
        "mgpu_core/sync_batchnorm/joint.py",
        "for part in parts[1:]:",
        "for part in ():",
        "test_sync_batchnorm.py",
    ),
    mutant(
        "batch norm: a rank that has ended is waited for",
        "mgpu_core/device/rendezvous.py",
        "if absent:",
        "if False:",
        "test_sync_batchnorm.py",
    ),
    # What a step shows of itself.
    mutant(
        "explain: bytes that stay where they are count as moved",
        "mgpu_core/explain/phases.py",
        "if place != home]",
        "if True]",
        "explain/test_story.py",
    ),
    mutant(
        "explain: hops forget which chunk they carry",
        "mgpu_core/explain/scenes.py",
        "hop.targets[0][2] if single else 0)",
        "0)",
        "explain/test_page.py",
    ),
    mutant(
        "explain: a forward loses its backward",
        "mgpu_core/comm/autograd.py",
        'with in_step(ctx.whole_step), span("reduce", ALL_RANKS',
        'with span("reduce", ALL_RANKS',
        "explain/test_story.py",
    ),
    mutant(
        "explain: two runs of backward are one",
        "mgpu_core/explain/story.py",
        "key = mark.text, mark.rank",
        'key = "", mark.rank',
        "explain/test_story.py",
    ),
    mutant(
        "explain: a forked child goes on with its parent's recording",
        "mgpu_core/record.py",
        "os.register_at_fork(after_in_child=_forget_in_child)\n",
        "",
        "test_record.py",
    ),
    mutant(
        "explain: a text of the story ends its element",
        "mgpu_core/explain/page.py",
        r'.replace("<", "\\u003c")',
        "",
        "explain/test_page.py",
    ),
    mutant(
        "explain: the ranks' older threads are not profiled",
        "mgpu_core/explain/labels.py",
        '"profile_all_threads": True',
        '"profile_all_threads": False',
        "explain/test_story.py",
    ),
    mutant(
        "explain: a recording does not end by itself",
        "mgpu_core/record.py",
        "if story.is_over():",
        "if False:",
        "test_record.py",
    ),
    mutant(
        "explain: an error of the recorder reaches the step",
        "mgpu_core/record.py",
        "        except Exception as error:\n            _fail(sink.story, error)",
        "        finally:\n            pass",
        "test_record.py",
    ),
    mutant(
        "explain: gradients are told as outputs",
        "mgpu_core/comm/autograd.py",
        'tell_cut(GATHER_BACK, "gradient',
        'tell_cut("gather", "gradient',
        "explain/test_adds_up.py",
    ),
    mutant(
        "explain: sums of sparse gradients are in no row",
        "mgpu_core/train/reducer.py",
        '            with span("reduce"):\n                buckets.sums.sparse',
        "            if True:\n                buckets.sums.sparse",
        "explain/test_adds_up.py",
    ),
    mutant(
        "explain: what failed is told as done",
        "mgpu_core/comm/watch.py",
        "if kind is None and self._before is not None:",
        "if self._before is not None:",
        "test_record.py",
    ),
    mutant(
        "explain: a rank that stands on the source was sent to",
        "mgpu_core/comm/watch.py",
        " if id(each) not in at_home)",
        ")",
        "test_record.py",
    ),
    mutant(
        "explain: a bucket is ready one gradient too early",
        "mgpu_core/train/reducer.py",
        "self._missing[rank][bucket] == 0",
        "self._missing[rank][bucket] >= 0",
        "test_record.py",
    ),
    mutant(
        "explain: hops of several rounds are one",
        "csrc/core/transcript.cpp",
        "deed.call = transcript.calls;",
        "deed.call = 0;",
        "test_transcript",
    ),
    # The core.
    mutant(
        "the tail of a vector is lost",
        "csrc/backends/cpu/reduce.cpp",
        "tail(r, whole_vectors(r));",
        "whole_vectors(r);",
        "test_reduce",
    ),
    mutant(
        "a NaN is forgotten",
        "csrc/backends/cpu/reduce.cpp",
        "(a < b) | (a != a) ? a : b",
        "a < b ? a : b",
        "test_reduce",
    ),
    mutant(
        "bf16 is cut, not rounded",
        "csrc/backends/cpu/lanes.h",
        "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16",
        "bits >> 16",
        "test_reduce",
    ),
    mutant(
        "the ring passes the wrong chunk on",
        "csrc/core/plan.cpp",
        "(rank - round - shift + 2 * ranks) % ranks",
        "(rank + round - shift + 2 * ranks) % ranks",
        "test_collectives",
    ),
    mutant(
        "the first rank gets all odd rows",
        "csrc/core/plan.cpp",
        "for (int64_t rank = 0; rank < count % ranks; ++rank) ++counts[rank];",
        "counts[0] += count % ranks;",
        "test_plan",
    ),
    mutant(
        "tiny shares take their rows from the last ranks",
        "csrc/core/plan.cpp",
        "return exact(rank) >= 1;",
        "return exact(rank) >= 0;",
        "test_plan",
    ),
    mutant(
        "a bucket may be too large",
        "csrc/core/plan.cpp",
        "if (!same_kind || filled + nbytes[i] > limit_nbytes)",
        "if (!same_kind || filled > limit_nbytes)",
        "test_plan",
    ),
    # Faults of CUDA kernels that host code forgives: the PTX machine runs these programs.
    mutant(
        "a block's sum does not wait for its warps",
        "csrc/backends/cuda/kernels/l2_norm.cuh",
        "  __syncthreads();\n",
        "",
        "ptx test_cuda_kernels",
    ),
    mutant(
        "every tile does the head and the tail",
        "csrc/backends/cuda/kernels/elements.cuh",
        "  if (tile != 0) return;\n",
        "",
        "ptx test_cuda_kernels",
    ),
    mutant(
        "two blocks write a stretch of a row",
        "csrc/backends/cuda/kernels/gather_rows.cuh",
        "stretch * row_tile(kWidth)",
        "stretch * (row_tile(kWidth) - 256)",
        "ptx test_cuda_kernel_edges",
    ),
    mutant(
        "places of vectors in 32 bits",
        "csrc/backends/cuda/kernels/elements.cuh",
        "const int64_t first = tile * kTileVectors + threadIdx.x;",
        "const int64_t first = static_cast<int>(tile) * kTileVectors + static_cast<int>(threadIdx.x);",
        "ptx test_ptx_large_counts",
    ),
]


def main() -> int:
    """Runs the mutants; the exit status."""
    parser = argparse.ArgumentParser(description="Puts faults into copies of the package and sees that tests fail.")
    parser.add_argument("--only", metavar="TEXT", help="only mutants with this in their name")
    parser.add_argument("--table", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if options.only is None or options.only in each.name]
    rows, survived = [], []
    for each, caught in run(chosen):
        print(f"{'caught  ' if caught else 'SURVIVED'} {each.name}: {caught or each.tests}", flush=True)
        rows.append((each, caught))
        if not caught:
            survived.append(each.name)
    print(f"{len(rows) - len(survived)} of {len(rows)} mutants caught")
    if options.table and not survived:
        TABLE.write_text(page(rows))
    return 1 if survived or not rows else 0


def run(mutants: list[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """Each mutant and the test that caught it, or ``""``."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        python = [each for each in mutants if not each.is_cpp]
        if python:
            home = copy_of_the_package(folder / "python")
            for each in python:
                yield each, in_copy(each, home, lambda each=each: failing_test(each, home))
        cpp = [each for each in mutants if each.is_cpp]
        if cpp:
            home = copy_of_the_sources(folder / "cpp")
            for each in cpp:
                yield each, in_copy(each, home, lambda each=each: failing_program(each, home))


def in_copy(each, home: Path, look) -> str:
    """The result of looking while the fault is in the copy."""
    path = home / each.path
    whole = path.read_text()
    path.write_text(each.text(home))
    try:
        return look()
    finally:
        path.write_text(whole)


def copy_of_the_package(home: Path) -> Path:
    """A folder from which ``import mgpu_core`` takes the copy, also where the package is installed editable."""
    import mgpu_core  # here: the C++ mutants need no installed package
    from mgpu_core import _core

    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(mgpu_core.__file__).parent, home / "mgpu_core", ignore=skip)
    shutil.copy(_core.__file__, home / "mgpu_core")
    finders = "ScikitBuildRedirectingFinder"
    (home / "sitecustomize.py").write_text(
        f"import sys\nsys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != {finders!r}]\n"
    )
    return home


def failing_test(each: Mutant, home: Path) -> str:
    """The first test that fails, as ``file::test``."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=60",
        *each.tests.split(),
    ]
    environment = os.environ | {"PYTHONPATH": str(home), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if each.tests.startswith("accelerator/"):
        environment["MGPU_TEST_FAKE"] = "1"
    ran = subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, text=True, timeout=600)
    if ran.returncode == 0:
        return ""
    for line in ran.stdout.splitlines():
        if line.startswith("FAILED "):
            return line.split()[1].removeprefix("tests/").split("[")[0].rstrip(":")
        if line.startswith("+++") and "Timeout" in line:
            return f"{each.tests} (ended by its time limit)"
    raise RuntimeError(f"{each.name}: the tests could not run\n{ran.stdout[-3000:]}\n{ran.stderr[-2000:]}")


def copy_of_the_sources(home: Path) -> Path:
    """The C++ half with its tests, configured and built once."""
    for name in ("csrc", "cmake", "tests/cpp", "tests/fakes"):
        shutil.copytree(ROOT / name, home / name)
    shutil.copy(ROOT / "CMakeLists.txt", home)
    options = ["-DMGPU_PYTHON=OFF", "-DMGPU_TESTS=ON", "-DMGPU_CUDA=off"]
    quietly(["cmake", "-S", home, "-B", home / "build", "-G", "Ninja", *options])
    quietly(["cmake", "--build", home / "build"])
    return home


def failing_program(each: Mutant, home: Path) -> str:
    """The first check that fails, as ``program: file:line``."""
    time.sleep(0.01)  # ninja looks at times
    program, on_ptx = each.program, each.program != each.tests
    quietly(["cmake", "--build", home / "build", "--target", program, *(["ptx_75"] if on_ptx else [])])
    environment = os.environ | ({"MGPU_TEST_PTX": "75"} if on_ptx else {})
    command = [home / "build" / "tests" / "cpp" / program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    if ran.returncode == 0:
        return ""
    if on_ptx:
        return f"cpp/{program}.cpp, from PTX"
    return f"cpp/{program}.cpp:{ran.stderr.split(':')[1] if ran.stderr.count(':') else '?'}"


def quietly(command: list[object]) -> None:
    """Runs a tool; shows what it said if it fails."""
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{command[0]} failed\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}")


def page(rows: list[tuple[Mutant, str]]) -> str:
    """docs/mutants.md."""
    lines = [
        "# Faults that the tests catch\n",
        "Made by `python tests/mutants.py --table`: each fault is put into a copy of the package, alone, and the test",
        "named beside it fails.\n",
        "| fault | file | caught by |",
        "|---|---|---|",
    ]
    lines += [f"| {each.name} | `{each.path}` | `{caught}` |" for each, caught in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
