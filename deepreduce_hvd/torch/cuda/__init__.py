"""The PyTorch adapter for gradients on GPUs."""
