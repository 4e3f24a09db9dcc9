"""Policies for each parameter, and plans that are made while training."""
