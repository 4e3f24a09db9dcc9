// Placement of the kernels of tf_ops/cuda: TensorFlow's GPUs, and the streams that it computes on.
#ifndef DEEPREDUCE_TF_OPS_PLACEMENT_H
#define DEEPREDUCE_TF_OPS_PLACEMENT_H

#if !GOOGLE_CUDA
#error "expected GOOGLE_CUDA=1, TensorFlow's flag of builds for CUDA"
#endif
#define EIGEN_USE_GPU

#include <cuda_runtime.h>

#include "tensorflow/core/framework/op_kernel.h"

namespace deepreduce_tf {

#define DR_PLACED Device(::tensorflow::DEVICE_GPU)

// Uses only inline and virtual functions, so it needs no symbol that a TensorFlow without CUDA
// lacks.
inline cudaStream_t stream_of(tensorflow::OpKernelContext* kernel) {
  return kernel->eigen_gpu_device().stream();
}

}  // namespace deepreduce_tf
#endif
