"""What :class:`mgpu_core.TrainStep` is made of: replicas that live, flat buckets, gradient sync, updates."""
