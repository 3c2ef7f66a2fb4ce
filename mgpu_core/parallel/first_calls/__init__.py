"""The first calls over several ranks: a table of observers, each with its number of calls."""

from mgpu_core.parallel.first_calls.calls import Call, FirstCalls, Observer

__all__ = ["Call", "FirstCalls", "Observer"]
