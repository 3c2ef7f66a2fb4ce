"""A right that many threads have at once, or one alone."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random

import pytest

from mgpu_core import Error
from mgpu_core.devices.exclusive import Exclusive


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_one_alone_keeps_others_out_who_wait_so_long_and_no_longer(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.1")
    exclusive, told = Exclusive("the other did not end"), []

    def impatient():
        with pytest.raises(Error) as raised:
            exclusive.enter(lambda: False)
        told.append(str(raised.value))

    with exclusive.enter():
        in_a_thread(impatient)
    assert told == ["the other did not end within 0.1 s; MGPU_CORE_TIMEOUT sets the limit"]

    def with_others():
        with exclusive.enter(lambda: False):
            told.append(exclusive.is_alone)
            with pytest.raises(Error, match="the other did not end within"):
                exclusive.enter()

    with exclusive.enter(lambda: False):
        assert not exclusive.is_alone
        in_a_thread(with_others)
    assert told[1:] == [False]
    with exclusive.enter():
        assert exclusive.is_alone


def test_a_thread_that_is_inside_may_come_in_again_and_is_out_when_it_has_left_the_outer_block(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.1")
    exclusive, came = Exclusive("the other did not end"), []

    def other():
        with suppress(Error), exclusive.enter():
            came.append(True)

    with exclusive.enter():
        with exclusive.enter():
            pass
        in_a_thread(other)
        assert not came
    in_a_thread(other)
    assert came


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="it needs a timer that sends signals")
def test_an_interrupt_at_any_moment_leaves_no_thread_inside(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "5")
    random = Random(0)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    cut_off = 0
    try:
        for _ in range(300):
            exclusive = Exclusive("the interrupted thread did not leave")
            with suppress(KeyboardInterrupt):
                cut_off += 1
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 4e-5))
                for _ in range(10):
                    with exclusive.enter():
                        pass
                time.sleep(0.01)  # an Event, cut off, may raise an error of its own
                cut_off -= 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            with ThreadPoolExecutor(1) as other:
                other.submit(exclusive.enter).result()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert cut_off > 200


def test_a_thread_that_ends_inside_keeps_others_out(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.1")
    exclusive, kept = Exclusive("the other did not end"), []
    in_a_thread(lambda: kept.append(exclusive.enter()))
    with pytest.raises(Error, match="the other did not end"):
        exclusive.enter()


@pytest.mark.parametrize("outer", [True, False])
def test_who_is_alone_stays_alone_inside_a_second_block(monkeypatch, outer):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.1")
    exclusive, came = Exclusive("the other did not end"), []

    def other():
        with suppress(Error), exclusive.enter(lambda: False):
            came.append(True)

    with exclusive.enter(lambda: outer):
        with exclusive.enter(lambda: not outer):
            assert exclusive.is_alone
            in_a_thread(other)
        assert not came
        in_a_thread(other)
    assert came == [True] * (not outer)


def test_others_come_in_while_one_that_is_alone_lends_its_right(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.2")
    exclusive, came = Exclusive("the other did not end"), []

    def other():
        with exclusive.enter():
            came.append(True)

    with exclusive.enter():
        with exclusive.lent():
            in_a_thread(other)
        assert came == [True]
        stays = []
        with pytest.raises(Error, match="the other did not end"), exclusive.lent():
            in_a_thread(lambda: stays.append(exclusive.enter()))  # and does not leave


def test_one_that_is_inside_waits_to_be_alone_until_the_others_have_left(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "8")
    exclusive, came = Exclusive("the other did not end"), threading.Event()

    def other():
        with exclusive.enter(lambda: False):
            came.set()
            threading.Event().wait(0.2)

    thread = threading.Thread(target=other)
    thread.start()
    assert came.wait(20)
    began = time.monotonic()
    with exclusive.enter(lambda: False), exclusive.enter():
        assert exclusive.is_alone
    assert time.monotonic() - began < 5
    thread.join(20)
