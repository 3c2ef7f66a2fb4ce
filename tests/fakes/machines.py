"""Runs a state machine of hypothesis: the same examples every time."""

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

EXAMPLES, DOINGS = 60, 30


def run_machine(machine, start):
    """So many examples of so many doings; other ones for another start."""
    chosen = settings(
        max_examples=EXAMPLES,
        stateful_step_count=DOINGS,
        phases=[Phase.generate],  # what is left out to make a failure short, takes minutes
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(start)(machine), settings=chosen)
