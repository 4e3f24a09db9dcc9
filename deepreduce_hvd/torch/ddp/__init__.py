"""The adapter for PyTorch's DistributedDataParallel, which needs no Horovod."""
