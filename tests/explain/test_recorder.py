"""``mgpu_core.explain``: no module, and the names that used to be below it."""

import importlib
from types import ModuleType

import pytest

import mgpu_core
from mgpu_core.explanation import steps, trace
from mgpu_core.explanation.step_profile import StepProfile

MOVED = {
    "Story": (trace.Trace, "mgpu_core.explanation.trace.Trace"),
    "Step": (steps.Step, "mgpu_core.explanation.steps.Step"),
    "StepProfile": (StepProfile, "mgpu_core.explanation.step_profile.StepProfile"),
    "labels": (mgpu_core.trace.labels, "mgpu_core.trace.labels"),
    "profile": (mgpu_core.trace.profile, "mgpu_core.trace.profile"),
}


def test_it_is_no_module():
    assert not isinstance(mgpu_core.explain, ModuleType)
    assert importlib.import_module("mgpu_core.explain") is mgpu_core.explain


@pytest.mark.parametrize("name", MOVED)
def test_a_name_that_has_moved_is_found_with_a_warning(name):
    here, path = MOVED[name]
    with pytest.warns(DeprecationWarning, match=f"mgpu_core.explain.{name} has moved: use {path}"):
        assert getattr(mgpu_core.explain, name) is here


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'story'"):
        _ = mgpu_core.explain.story
