// Marks inline functions that processors and CUDA devices share.
#ifndef DEEPREDUCE_HOST_DEVICE_H
#define DEEPREDUCE_HOST_DEVICE_H

#ifdef __CUDACC__
#define DR_HOST_DEVICE __host__ __device__
#else
#define DR_HOST_DEVICE
#endif

#endif
