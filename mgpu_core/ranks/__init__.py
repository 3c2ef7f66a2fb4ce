"""One way to run: the ranks of a call, their waits for each other, and the settings that they take along."""
