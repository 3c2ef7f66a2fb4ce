"""The first calls over several ranks: a table of observers, and one counter."""

from mgpu_core.parallel.first_calls.calls import Call, FirstCalls, Observer

__all__ = ["Call", "FirstCalls", "Observer"]
