"""A model cut over several devices: schedules, stages, and :class:`mgpu_core.Pipeline`."""
