// Messages beside payloads: notices of failures, and the probe in Horovod's own allreduce.
#ifndef DEEPREDUCE_WIRE_H
#define DEEPREDUCE_WIRE_H

#include "base.h"

namespace deepreduce {

dr_message read_message(const uint8_t* messages, uint64_t size);
void write_notice(dr_context* context, const char* text, uint64_t text_bytes);
void write_size_notice(dr_context* context, uint64_t size, uint64_t senders, uint64_t most,
                       uint64_t rank);
void make_probe(uint64_t rank, uint32_t fingerprint, uint64_t step, double loss_scale,
                double* probe);
double scale_of(const double* reduced_probe, const uint64_t* ranks, uint64_t rank_count,
                uint32_t fingerprint, uint64_t step, double loss_scale);

}  // namespace deepreduce
#endif
