"""A recorded step goes to JSON and back, and a damaged one is refused with a word on what is wrong."""

import dataclasses
import json

import pytest

from mgpu_core.tools.explain.step_profile import BucketProfile, StepProfile

STEP = StepProfile(
    "net", 2, 64, 0.25, 0.5, 0.125, 1000, 0, (BucketProfile(400, 0.5), BucketProfile(600, 1.0)), 0.0625, 5000, 0.25
)


def test_there_and_back():
    assert StepProfile.from_json(STEP.to_json()) == STEP


@pytest.mark.parametrize(
    ("name", "value"), [("host_overhead_seconds", 0.0), ("broadcast_nbytes", 0), ("host_forward_seconds", 0.0)]
)
def test_what_older_files_lack_may_be_left_out(name, value):
    content = json.loads(STEP.to_json())
    del content[name]
    assert StepProfile.from_json(json.dumps(content)) == dataclasses.replace(STEP, **{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "ranks must be a whole number of at least 1, not 0"),
        ({"ranks": True}, "ranks must be a whole number"),
        ({"ranks": 2.0}, "ranks must be a whole number of at least 1, not 2.0"),
        ({"ranks": 65}, "64 rows over 65 ranks: some rank has none"),
        ({"rows": 10**400}, "rows must be a whole number"),
        ({"forward_seconds": -1}, "forward_seconds must be a number, finite and not negative, not -1"),
        ({"backward_seconds": float("nan")}, "backward_seconds must be a number, finite"),
        ({"update_seconds": "1"}, "update_seconds must be a number, finite and not negative, not '1'"),
        ({"forward_seconds": 0, "backward_seconds": 0}, "both 0: nothing was computed"),
        ({"scatter_nbytes": -1}, "scatter_nbytes must be a whole number of at least 0"),
        ({"broadcast_nbytes": -1}, "broadcast_nbytes must be a whole number of at least 0"),
        ({"name": 3}, "name must be a string, not 3"),
        ({"buckets": 3}, "buckets must be a list of objects"),
        ({"buckets": [3]}, "a bucket must be a JSON object, not 3"),
        ({"buckets": [{"nbytes": 4}]}, "a bucket lacks: ready_fraction"),
        ({"buckets": [{"nbytes": 4, "ready_fraction": 2}]}, "ready_fraction must be 0 to 1, not 2"),
        ({"buckets": [{"nbytes": 0, "ready_fraction": 1}]}, "a bucket's nbytes must be a whole number of at least 1"),
        ({"colour": 1}, "the step has unknown fields: colour"),
        ({"format": "other"}, 'not a recorded step: wanted a JSON object with "format"'),
    ],
)
def test_a_damaged_step_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        StepProfile.from_json(json.dumps(json.loads(STEP.to_json()) | change))


@pytest.mark.parametrize(
    ("text", "message"), [("", "not JSON"), ("{", "not JSON"), ("[]", "not a recorded step"), ("3", "not a recorded")]
)
def test_what_is_no_step_at_all(text, message):
    with pytest.raises(ValueError, match=message):
        StepProfile.from_json(text)


def test_a_missing_field_is_named():
    content = json.loads(STEP.to_json())
    del content["rows"], content["update_seconds"]
    with pytest.raises(ValueError, match="the step lacks: rows, update_seconds"):
        StepProfile.from_json(json.dumps(content))
