"""Inference over several devices: requests of many threads are joined into batches, and answered in order."""
