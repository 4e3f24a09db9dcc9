"""Policies per parameter, and how the running job decides what to send and when."""
