// Where the kernels of tf_ops/cuda run: on TensorFlow's GPUs, each on the stream that TensorFlow
// computes on there.
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

// Of inline and virtual functions only: it binds to no symbol that a TensorFlow without CUDA lacks.
inline cudaStream_t stream_of(tensorflow::OpKernelContext* kernel) {
  return kernel->eigen_gpu_device().stream();
}

}  // namespace deepreduce_tf
#endif
