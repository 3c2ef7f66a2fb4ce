"""Loaders: batches on the devices of a team, and batches cut from tensors."""
