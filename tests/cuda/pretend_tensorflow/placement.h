// Replaces tf_ops/cuda/gpu/placement.h: the GPU kernels run on the host, in the emulator, for
// operators with this label.
#ifndef DEEPREDUCE_TF_OPS_PLACEMENT_H
#define DEEPREDUCE_TF_OPS_PLACEMENT_H

#include <cuda_runtime.h>

#include "tensorflow/core/framework/op_kernel.h"

namespace deepreduce_tf {

#define DR_PLACED Device(::tensorflow::DEVICE_CPU).Label("emulated")

inline cudaStream_t stream_of(tensorflow::OpKernelContext*) { return nullptr; }

}  // namespace deepreduce_tf
#endif
