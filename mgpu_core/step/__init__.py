"""The parts of :class:`mgpu_core.TrainStep`: persistent replicas, flat buckets, gradient sync, updates."""
