"""One way to run: who is at work in a call of several ranks, what they wait for, and what they take along."""
