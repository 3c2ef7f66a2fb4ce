"""Several processes, each with a team of its own: their messages, and the settings they must agree on."""
