"""What the adapters of both frameworks share."""
