"""Functions with the same result on every processor: logarithms, random numbers, codes."""
