"""A right that many threads have at once, or one alone."""

import threading

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
    in_a_thread(lambda: told.append(exclusive.enter(lambda: False)))
    assert told[1:] == [False]
    with pytest.raises(Error, match="the other did not end within"):
        exclusive.enter()
    exclusive.leave()
    exclusive.leave()
    assert exclusive.enter() is True


@pytest.mark.parametrize("again", [True, False])
def test_a_thread_that_is_alone_comes_in_once_more_or_is_told_at_once(again):
    exclusive = Exclusive("the other did not end", again=again)
    with exclusive:
        if again:
            with exclusive:
                pass
        else:
            with pytest.raises(Error, match="it waits for this call, which is inside it"):
                exclusive.enter()
    assert exclusive.enter(lambda: False) is False
