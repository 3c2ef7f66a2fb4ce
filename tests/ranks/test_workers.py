"""The worker threads: what they share, that they end, and that the process ends as the user wanted.

How a process ends can only be seen from outside: those tests run a small program in a child, under a limit.
"""

import gc
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from contextvars import ContextVar, copy_context
from unittest import mock

import pytest
import torch
from fakes.collector import FREES_LATE
from fakes.threads import at_once

import mgpu_core
from mgpu_core.devices.time_limits import time_limit
from mgpu_core.ranks import workers
from mgpu_core.ranks.team import Team
from mgpu_core.ranks.workers import EXIT_SECONDS, WorkerPool

SECONDS = 60  # of a child in all: importing torch alone takes some
PROLOGUE = """
import os, signal, sys, threading, time
import torch, mgpu_core
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
model = mgpu_core.DataParallel(net, ["cpu"] * 3)
model(torch.randn(6, 4)).sum().backward()
def done():
    print("done", time.monotonic(), flush=True)
"""


def run_child(program, **options):
    """Runs PROLOGUE and the program; returns (exit code, output, seconds from the last "done" to the end)."""
    code = PROLOGUE + textwrap.dedent(program)
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )
    try:
        out, err = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        pytest.fail(f"the child hangs: {child.communicate()}")
    ended = time.monotonic()
    said = [line.split() for line in out.decode().splitlines() if line.startswith("done")]
    return child.returncode, out.decode(), err.decode(), ended - float(said[-1][1]) if said else None


ENDINGS = {
    "normal": ("done()", 0),
    "sys.exit(3)": ("done()\nsys.exit(3)", 3),
    "uncaught error": ("done()\nraise KeyError('no')", 1),
    "error in a replica": ("done()\nmodel(torch.randn(6, 5))", 1),
    "exit while workers are in torch": (
        """
        class Busy(torch.nn.Module):
            def forward(self, x):
                for _ in range(200):
                    x = torch.randn(300, 300) @ torch.randn(300, 300)
                return x
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            mgpu_core.DataParallel(Busy(), ["cpu"] * 3)(torch.randn(6, 4))
        except KeyboardInterrupt:
            done()
        """,
        0,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_as_it_should(ending):
    program, wanted = ENDINGS[ending]
    code, _, err, seconds = run_child(program)
    assert code == wanted, err
    assert seconds is not None
    assert seconds < 2.5 * EXIT_SECONDS  # it waits so long at most for workers, and a busy machine takes some to end


@pytest.mark.slow
def test_ctrl_c_in_a_forward():
    program = """
    class Stuck(torch.nn.Module):
        def forward(self, x):
            time.sleep(2)
            return x
    stuck = mgpu_core.DataParallel(Stuck(), ["cpu"] * 3)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        stuck(torch.randn(6, 4))
    except KeyboardInterrupt:
        print("interrupted", model(torch.ones(6, 4)).shape)
        done()
        raise
    """
    code, out, err, seconds = run_child(program)
    assert "interrupted torch.Size([6, 2])" in out, err
    assert code == -signal.SIGINT
    assert seconds < 5


def test_fork_then_forward():
    program = """
    codes = []
    for _ in range(20):  # one child in 200 died when two of its workers made autograd's engine anew at once
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            out = model(torch.ones(6, 4))
            os._exit(7 if torch.equal(out, net(torch.ones(6, 4))) else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print("children", set(codes))
    assert model(torch.ones(6, 4)).shape == (6, 2)
    done()
    """
    code, out, err, seconds = run_child(program)
    assert code == 0, err
    assert "children {7}" in out
    assert seconds < 5


def test_forward_inside_a_data_loader_worker():
    program = """
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, i):
            with torch.no_grad():
                return model(torch.full((6, 4), float(i)))
    for i, batch in enumerate(torch.utils.data.DataLoader(Rows(), num_workers=2, timeout=30)):
        assert torch.allclose(batch[0], net(torch.full((6, 4), float(i))))
    done()
    """
    code, _, err, seconds = run_child(program)
    assert code == 0, err
    assert seconds < 5


def test_200_wrappers_made_and_dropped():
    x = torch.randn(6, 4)
    counts = []
    for k in range(200):
        ranks = 2 + k % 12  # more different teams than are remembered
        model = mgpu_core.DataParallel(torch.nn.Linear(4, 2), ["cpu"] * ranks)
        model(x)
        del model
        if k % 24 == 23:
            wait_until(lambda: worker_threads() <= 8 * 13)
            counts.append(worker_threads())
    assert max(counts[1:]) <= max(counts[0], 8 * 13)


def worker_threads():
    return sum(thread.name.startswith("mgpu-rank") for thread in threading.enumerate())


def wait_until(holds):
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_threads_end_with_their_team():
    team = Team((torch.device("cpu"),) * 3)  # not Team.of: remembered by nobody
    with team.workers.lease():
        threads = team.workers.threads()
    assert len(threads) == 3
    assert all(thread.is_alive() for thread in threads)
    del team
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_close_and_go_on():
    model = mgpu_core.DataParallel(torch.nn.Linear(4, 2), ["cpu"] * 7)
    x = torch.randn(7, 4)
    wanted = model(x)
    threads = Team.of(["cpu"] * 7).workers.threads()
    model.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert torch.equal(model(x), wanted)


def test_a_worker_is_used_again_and_has_its_share_of_the_cores():
    before = torch.get_num_threads()
    pool = WorkerPool("test", 2, 2)
    seen = []
    for _ in range(3):
        with pool.lease() as crew:
            seen.append(
                [(o.value, t) for o, t in zip(crew.run([threading.get_ident] * 2, 10), crew.workers, strict=True)]
            )
    assert seen[0] == seen[1] == seen[2]
    with pool.lease() as crew:
        shares = [outcome.value for outcome in crew.run([torch.get_num_threads] * 2, 10)]
    assert shares == [max(1, before // 2)] * 2
    assert torch.get_num_threads() == before
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [before]
    pool.close()


def test_the_share_follows_the_callers_threads():
    before, pool = torch.get_num_threads(), WorkerPool("test", 2, 2)
    found = []
    try:
        for threads in (2, 8, 8, 4):
            torch.set_num_threads(threads)
            with pool.lease() as crew:
                found.append([outcome.value for outcome in crew.run([torch.get_num_threads] * 2, 10)])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
        pool.close()
    assert found == [[1, 1], [4, 4], [4, 4], [2, 2]]


def test_ranks_inside_a_rank_share_its_threads():
    before, found = torch.get_num_threads(), []
    outer, inner = WorkerPool("outer", 2, 2), WorkerPool("inner", 2, 2)

    def nested():
        with inner.lease() as crew:
            return [outcome.value for outcome in crew.run([torch.get_num_threads] * 2, 10)]

    try:
        torch.set_num_threads(8)
        with outer.lease() as crew:
            found = [outcome.value for outcome in crew.run([nested] * 2, 10)]
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
        outer.close()
        inner.close()
    assert found == [[2, 2], [2, 2], 8]


def test_a_busy_team_makes_another_crew():
    pool = WorkerPool("test", 2, 0)
    with pool.lease() as one, pool.lease() as two:
        assert {w.thread for w in one.workers}.isdisjoint({w.thread for w in two.workers})

        # From inside a task of the same pool: nobody waits for himself.
        def inner():
            with pool.lease() as three:
                return [outcome.value for outcome in three.run([lambda: 1, lambda: 2], 10)]

        assert [outcome.value for outcome in one.run([inner, inner], 20)] == [[1, 2], [1, 2]]
    pool.close()


def test_a_rank_that_does_not_end():
    pool = WorkerPool("test", 2, 0)
    gate = threading.Event()
    with pytest.raises(mgpu_core.Error, match=r"rank 1 did not end within 0.2 s \(1 of 2"), pool.lease() as crew:
        crew.run([lambda: None, lambda: gate.wait(30)], 0.2)
    gate.set()
    for worker in crew.workers:
        worker.thread.join(10)
        assert not worker.thread.is_alive()
    with pool.lease() as crew:  # the team is still usable
        assert crew.run([lambda: 5, lambda: 6], 10)[1].value == 6
    pool.close()


def test_the_limit_is_the_users(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "2.5")
    assert time_limit() == 2.5
    for text in ("0", "-1", "soon", "inf", "nan"):
        monkeypatch.setenv("MGPU_CORE_TIMEOUT", text)
        with pytest.raises(ValueError, match="MGPU_CORE_TIMEOUT must be a positive"):
            time_limit()


def test_a_result_is_not_kept_by_its_worker():
    class Value:
        pass

    pool = WorkerPool("test", 1, 0)
    with pool.lease() as crew:
        outcome = crew.run([Value], 10)[0]
        reference = weakref.ref(outcome.value)
        del outcome
        if FREES_LATE:
            crew.run([int], 10)  # its worker frees it, see wake_workers
        assert reference() is None
    pool.close()


@pytest.mark.skipif(not FREES_LATE, reason="a build with a GIL frees at once")
def test_an_idle_worker_frees_what_it_made():
    """Without a job: it wakes now and then, also long after its last job."""

    class Value:
        pass

    pool = WorkerPool("test", 1, 0)
    with pool.lease() as crew:
        for pause in (0, 5 * workers.LAST_WAKE):
            outcome = crew.run([Value], 10)[0]
            reference = weakref.ref(outcome.value)
            time.sleep(pause)
            del outcome
            wait_until(lambda: reference() is None)  # noqa: B023
    pool.close()


def test_workers_start_without_context_variables():
    """Python 3.14t gives a new thread the variables of its maker, which a worker would keep as long as it lives."""
    variable = ContextVar("variable")
    variable.set("of the maker")
    seen = []

    class Thread(workers._WorkerThread):
        def start(self):
            seen.extend(copy_context())
            super().start()

    with mock.patch.object(workers, "_WorkerThread", Thread):
        worker = workers._Worker("test")
    worker.inbox.put(None)
    worker.thread.join(20)
    assert variable in copy_context()
    assert seen == []


def test_a_pool_may_be_made_while_all_are_looked_at():
    stop = threading.Event()

    def looks():
        while not stop.is_set():
            workers._alive()

    def makes():
        try:
            kept = [WorkerPool("test", 1, 0) for _ in range(500)]
            assert {id(each) for each in workers._alive()} >= {id(each) for each in kept}
        finally:
            stop.set()

    at_once(looks, makes)


def test_team_is_one_per_list_of_devices():
    team = Team.of(["cpu"] * 3)
    assert team is Team.of([torch.device("cpu")] * 3)
    assert team is not Team.of(["cpu"] * 2)
    assert team.first(2) is Team.of(["cpu", "cpu"])
    assert len(team) == 3
    assert list(team.ranks) == [0, 1, 2]
    assert pickle.loads(pickle.dumps(team)) is team


def workers_of(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def gone(name, seconds=20):
    end = time.monotonic() + seconds
    while workers_of(name) and time.monotonic() < end:
        time.sleep(0.01)
    return not workers_of(name)


def test_a_crew_that_nobody_gets_goes_home():
    """As where Ctrl-C comes before it is lent."""
    crew = workers.Crew("lost", 3)
    assert len(workers_of("lost")) == 3
    del crew
    assert gone("lost")


def test_a_crew_that_is_not_complete_goes_home(monkeypatch):
    started, start = [], workers._WorkerThread.start

    def fails_at_the_third(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(workers._WorkerThread, "start", fails_at_the_third)
    with pytest.raises(RuntimeError, match="new thread"):
        workers.Crew("half", 4)
    assert len(started) == 2
    assert gone("half")


def test_ctrl_c_while_cores_are_shared_leaves_the_process_its_threads(monkeypatch):
    before = torch.get_num_threads()

    def interrupted(crew, tasks, seconds):
        for worker, task in zip(crew.workers, tasks, strict=True):
            worker.inbox.put(workers._Job(task, 0, workers._AtWork(())))  # each sets its share, sooner or later
        raise KeyboardInterrupt

    monkeypatch.setattr(workers.Crew, "run", interrupted)
    try:
        torch.set_num_threads(8)
        with pytest.raises(KeyboardInterrupt):
            workers.Crew("cores", 2).share(8, 2)
        assert gone("cores")
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert found == [8]
    finally:
        torch.set_num_threads(before)


def test_the_end_of_the_process_passes_over_a_thread_that_never_began():
    code, _, err, _ = run_child(
        """
        import mgpu_core.ranks.workers as workers
        thread = workers._WorkerThread(target=print)
        threading._limbo[thread] = thread  # its start was cut off
        done()
        """
    )
    assert (code, err) == (0, "")
