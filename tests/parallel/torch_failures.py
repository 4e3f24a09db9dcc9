"""Raise errors on one rank, or on all, with PyTorch.

The job must end with a message on every rank. Started under horovodrun.
"""

import sys
import time
import traceback

import horovod.torch as hvd
import torch
from torch_tools import backward, distributed, model

import deepreduce_hvd as dr

#: in which the other rank shows its error
_SECONDS = 3.0


def bad_gradient_type_on_one_rank():
    dtype = torch.complex64 if hvd.rank() == 1 else torch.float32
    weight = torch.nn.Parameter(torch.ones(200, dtype=dtype), requires_grad=False)
    # only dtypes of trained parameters are checked when the compressor is created
    compressor = dr.Compressor(parameters=[("weight", weight)], dense_below=50)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight.requires_grad_()], lr=0.1),
        named_parameters=[("weight", weight)],
        compression=compressor,
    )
    weight.abs().sum().backward()
    optimizer.step()


def other_codec_on_one_rank():
    network = model()
    optimizer, _ = distributed(network, dr.Codec(dr.TopK(0.02 if hvd.rank() == 1 else 0.05)))
    backward(network, 0)
    optimizer.step()


def other_process_set():
    network = model()
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    optimizer, _ = distributed(network, compressor_options={"process_set": alone[hvd.rank()]})
    backward(network, 0)
    optimizer.step()


if __name__ == "__main__":
    hvd.init()
    try:
        globals()[sys.argv[1]]()
    except Exception:
        traceback.print_exc()
        # when a rank ends, horovodrun ends the others, which may not have shown their error yet
        time.sleep(_SECONDS)
        raise
    print("went on silently")
