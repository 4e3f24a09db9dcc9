"""The stages of a codec: sparsifiers, index codecs, value codecs and memories, one method a file."""
