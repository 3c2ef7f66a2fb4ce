"""What was measured once: kept in files, per machine; off, corrupt and unwritable caches."""

import json
import os

import pytest

from mgpu_core.devices import cache

KEY = {"gpus": ["GPU-1"], "driver": 13000}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    cache.forget()
    yield tmp_path / "cache"
    cache.forget()


def test_a_later_process_finds_it(folder):
    assert cache.load("peers", KEY) is None
    cache.store("peers", KEY, [1, 2])
    cache.forget()
    assert cache.load("peers", KEY) == [1, 2]
    assert cache.load("tuning", KEY) is None
    assert cache.load("peers", {**KEY, "driver": 12000}) is None
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe", b'{"format": "mgpu_core cache 1"}']
)
def test_a_corrupt_file_is_as_good_as_none(folder, content):
    cache.store("peers", KEY, [1])
    (path,) = folder.iterdir()
    path.write_bytes(content)
    cache.forget()
    assert cache.load("peers", KEY) is None
    cache.store("peers", KEY, [2])
    cache.forget()
    assert cache.load("peers", KEY) == [2]


def test_a_file_about_another_machine_is_not_believed(folder):
    cache.store("peers", KEY, [1])
    (path,) = folder.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "key": {"gpus": ["GPU-2"]}}))
    cache.forget()
    assert cache.load("peers", KEY) is None


def test_off_keeps_it_for_the_process_alone(folder, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, "off")
    cache.store("peers", KEY, [1])
    assert cache.load("peers", KEY) == [1]
    cache.forget()
    assert cache.load("peers", KEY) is None
    assert not folder.exists()


def test_where_nothing_can_be_written_it_lives_with_the_process(folder):
    folder.write_text("a file where the folder should be")
    cache.store("peers", KEY, [1])
    assert cache.load("peers", KEY) == [1]
    cache.forget()
    assert cache.load("peers", KEY) is None


def test_the_default_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "mgpu_core"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "mgpu_core"
    assert os.environ["HOME"] == str(tmp_path)


def test_what_is_nested_beyond_reason_is_as_good_as_none(folder):
    cache.store("peers", KEY, [1, 2])
    cache.forget()
    [file] = folder.iterdir()
    file.write_text("[" * 100_000)
    assert cache.load("peers", KEY) is None


def test_without_a_home_folder_it_lives_as_long_as_the_process(monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, "~nobody-of-that-name/cache")
    assert cache.cache_folder() is None
    cache.store("peers", KEY, [1, 2])
    assert cache.load("peers", KEY) == [1, 2]
