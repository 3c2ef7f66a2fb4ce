"""Several GPUs, one Python process: a better ``torch.nn.DataParallel``, and what is under it."""
