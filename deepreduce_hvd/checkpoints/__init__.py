"""The state of a compressor: saved, loaded, and divided for another number of ranks."""
