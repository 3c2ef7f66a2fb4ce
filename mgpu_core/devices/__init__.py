"""Which devices there are, the ranks on them, their streams and their worker threads."""
