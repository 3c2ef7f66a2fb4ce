"""Other frameworks over several ranks: one file for each, which imports its framework when it is imported itself."""
