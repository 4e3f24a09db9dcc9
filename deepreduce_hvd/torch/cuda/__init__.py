"""Gradients on GPUs."""
