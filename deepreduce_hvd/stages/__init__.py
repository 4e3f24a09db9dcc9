"""The stages of a codec: sparsifiers, index codecs, value codecs and memories, one per file."""
