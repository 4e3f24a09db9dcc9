"""Numbers and bits that are the same on every processor: logarithms, random numbers,
variable-length codes.
"""
