"""Coordination of ranks: handshake, roll call, elastic training, and the watch on waits."""
