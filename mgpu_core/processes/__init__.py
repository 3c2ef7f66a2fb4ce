"""Several processes, each with a team of its own: what they send each other, and what they must agree on."""
