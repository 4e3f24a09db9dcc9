"""Index codecs, one file each."""

from deepreduce_hvd.index.bitmap import Bitmap
from deepreduce_hvd.index.bloom import Bloom
from deepreduce_hvd.index.elias_fano import EliasFano
from deepreduce_hvd.index.huffman import Huffman
from deepreduce_hvd.index.raw_index import RawIndex
from deepreduce_hvd.index.rice import Rice
from deepreduce_hvd.index.rle import RLE

__all__ = ["RLE", "Bitmap", "Bloom", "EliasFano", "Huffman", "RawIndex", "Rice"]
