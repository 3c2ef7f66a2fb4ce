"""The command line and what it runs: none of it is needed to train."""
