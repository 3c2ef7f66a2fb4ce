"""Run several works at once, each in a thread of its own, and wait for them with a limit."""

import sys
import threading

SECONDS = 60  # for all threads together: far more than any of them needs


def at_once(*works, rounds=1):
    """Call each work ``rounds`` times in a thread of its own, all from the same moment; raise the first failure."""
    start, failures = threading.Barrier(len(works)), []

    def run(work):
        try:
            start.wait(SECONDS)
            for _ in range(rounds):
                if failures:
                    return
                work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # with the GIL, threads change places often
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    finally:
        sys.setswitchinterval(before)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"
