"""A right that many threads have at once, or one alone."""

import threading
import time

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

    with exclusive:
        in_a_thread(impatient)
    assert told == ["the other did not end within 0.1 s; MGPU_CORE_TIMEOUT sets the limit"]
    assert exclusive.enter(lambda: False) is False

    def with_others():
        told.append(exclusive.enter(lambda: False))
        with pytest.raises(Error, match="the other did not end within"):
            exclusive.enter()
        exclusive.leave()

    in_a_thread(with_others)
    assert told[1:] == [False]
    assert exclusive.enter() is True


def test_a_thread_that_was_cut_off_inside_does_not_keep_itself_out():
    exclusive = Exclusive("the other did not end")
    exclusive.enter()
    with exclusive:
        pass
    in_a_thread(exclusive.enter)


def test_who_leaves_without_being_inside_lets_nobody_in(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.1")
    exclusive = Exclusive("the other did not end")
    in_a_thread(exclusive.enter)  # and has ended without leaving
    exclusive.leave()
    with pytest.raises(Error, match="the other did not end"):
        exclusive.enter()


def test_one_that_is_inside_waits_to_be_alone_until_the_others_have_left(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "8")
    exclusive, came = Exclusive("the other did not end"), threading.Event()
    exclusive.enter(lambda: False)

    def other():
        exclusive.enter(lambda: False)
        came.set()
        threading.Event().wait(0.2)
        exclusive.leave()

    thread = threading.Thread(target=other)
    thread.start()
    assert came.wait(20)
    began = time.monotonic()
    assert exclusive.enter() is True
    assert time.monotonic() - began < 5
    thread.join(20)
