"""The codecs that benchmarks/hosts.py compares, under Horovod and under DDP."""

import deepreduce_hvd as dr

RATIO = 0.01
RECOMMENDED = dr.Codec(dr.TopK(RATIO), index=dr.Rice(), value=dr.QSGD(bits=4))
CHUNKS = dr.Codec(dr.ChunkTopK(RATIO), index=dr.Rice(), value=dr.QSGD(bits=4))
