"""Index codecs, one per file."""

from deepreduce_hvd.stages.index_codecs.bitmap import Bitmap
from deepreduce_hvd.stages.index_codecs.bloom import Bloom
from deepreduce_hvd.stages.index_codecs.elias_fano import EliasFano
from deepreduce_hvd.stages.index_codecs.huffman import Huffman
from deepreduce_hvd.stages.index_codecs.raw_index import RawIndex
from deepreduce_hvd.stages.index_codecs.rice import Rice
from deepreduce_hvd.stages.index_codecs.rle import RLE

__all__ = ["RLE", "Bitmap", "Bloom", "EliasFano", "Huffman", "RawIndex", "Rice"]
