"""Faults derived from the syntax of the package, put in one at a time, to see that the tests notice."""
