// The C ABI: converts failures to a status and a message, and sets the default floating-point
// environment.
#include <algorithm>
#include <cstdio>
#include <new>

#include "api/arguments.h"
#include "codecs.h"
#include "container/encode.h"
#include "container/payload.h"
#include "container/wire.h"
#include "select/sparse.h"
#include "support/floating_point.h"

namespace deepreduce {
namespace {

Simd best_simd() {
#if defined(__x86_64__)
  // a level needs all features that its functions are compiled with; a virtual machine may hide any
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return Simd::avx512;
  if (avx2) return Simd::avx2;
#endif
  return Simd::scalar;
}

Simd allowed_simd(int32_t wanted) {
  const Simd best = best_simd();
  return wanted < 0 || wanted >= static_cast<int>(best) ? best : static_cast<Simd>(wanted);
}

template <class Work>
int guarded(dr_context* context, Work work) {
  const DefaultFloatingPoint guard;
  context->message[0] = '\0';
  try {
    Arena arena(context);
    Context inner{arena, allowed_simd(context->simd)};
    work(inner);
    return DR_OK;
  } catch (const Failure& failure) {
    std::snprintf(context->message, sizeof(context->message), "%s", failure.message);
    return failure.status;
  } catch (const std::bad_alloc&) {
    std::snprintf(context->message, sizeof(context->message), "no memory");
    return DR_OUT_OF_MEMORY;
  }
}

dr_header as_header(const Header& header) {
  return {header.version,     header.flags,       header.index_id,    header.value_id,
          header.dtype,       header.order,       header.d,           header.count,
          header.index_bytes, header.value_bytes, header.order_bytes, header.total_bytes()};
}

}  // namespace
}  // namespace deepreduce

using namespace deepreduce;

extern "C" {

int dr_read_codec(dr_context* context, const double* fields, uint64_t field_count,
                  dr_codec* codec) {
  return guarded(context, [&](Context&) { *codec = codec_of(fields, field_count); });
}

int dr_encode(dr_context* context, const dr_codec* codec, dr_encoding* encoding) {
  return guarded(context, [&](Context& inner) { encode(context, inner, *codec, *encoding); });
}

int dr_select(dr_context* context, const dr_codec* codec, dr_encoding* encoding,
              const uint32_t* given, uint64_t given_count, int32_t* non_finite) {
  return guarded(context, [&](Context& inner) {
    *non_finite = !select_elements(context, inner, *codec, *encoding, given, given_count);
  });
}

int dr_encode_sparse(dr_context* context, const dr_codec* codec, dr_sparse_encoding* encoding) {
  return guarded(context,
                 [&](Context& inner) { encode_sparse(context, inner, *codec, *encoding); });
}

int dr_decode_sum(dr_context* context, const uint8_t* const* payloads, const uint64_t* sizes,
                  uint64_t payload_count, float* out, uint64_t d, float scale, float* largest) {
  return guarded(context, [&](Context& inner) {
    Largest of_all;
    for (uint64_t p = 0; p < payload_count; ++p)
      decode_sum(inner, payloads[p], sizes[p], out, d, scale, of_all);
    if (largest != nullptr) *largest = of_all.magnitude();
  });
}

int dr_decode_sparse(dr_context* context, const uint8_t* const* payloads, const uint64_t* sizes,
                     uint64_t payload_count, uint64_t d, float scale) {
  return guarded(context, [&](Context& inner) {
    decode_sparse(context, inner, payloads, sizes, payload_count, d, scale);
  });
}

int dr_keep_largest(dr_context* context, const uint32_t* indices, const float* values,
                    uint64_t count, uint64_t k) {
  return guarded(context, [&](Context& inner) {
    if (count > kMaxElements)
      invalid_argument("count: expected at most %llu, got %llu",
                       static_cast<unsigned long long>(kMaxElements),
                       static_cast<unsigned long long>(count));
    uint8_t* out = static_cast<uint8_t*>(context->output(context->user, size_t{8} * count));
    if (out == nullptr) Arena::out_of_memory(count, 8);
    keep_largest(inner, indices, values, static_cast<uint32_t>(count),
                 static_cast<uint32_t>(std::min(k, count)), reinterpret_cast<uint32_t*>(out),
                 reinterpret_cast<float*>(out + size_t{4} * count));
  });
}

int dr_put_back(dr_context* context, const dr_stage* memory, const uint32_t* indices,
                const float* values, uint64_t count, uint64_t start, float* residual, uint64_t d) {
  return guarded(context,
                 [&](Context&) { put_back(*memory, indices, values, count, start, residual, d); });
}

int dr_add_sparse(dr_context* context, const uint32_t* indices, const float* values, uint64_t count,
                  uint64_t start, float scale, float* out, uint64_t d, float* largest) {
  return guarded(context, [&](Context&) {
    Largest of_all;
    add_sparse(indices, values, count, start, scale, out, d, of_all);
    if (largest != nullptr) *largest = of_all.magnitude();
  });
}

int dr_inspect(dr_context* context, const uint8_t* data, uint64_t size, dr_header* header) {
  return guarded(
      context, [&](Context& inner) { *header = as_header(read_payload(inner.simd, data, size)); });
}

int dr_read_header(dr_context* context, const uint8_t* start, uint64_t size, dr_header* header) {
  return guarded(context, [&](Context&) { *header = as_header(read_header(start, size)); });
}

void dr_decoding_codec(const dr_header* header, dr_codec* codec) {
  *codec = {};
  codec->index.id = header->index_id == kAllIndices ? int{kRawIndex} : header->index_id;
  codec->value.id = header->value_id == 0 ? int{kRawValue} : header->value_id;
}

int dr_read_message(dr_context* context, const uint8_t* messages, uint64_t size,
                    dr_message* message) {
  return guarded(context, [&](Context&) { *message = read_message(messages, size); });
}

int dr_write_notice(dr_context* context, const char* text, uint64_t text_bytes) {
  return guarded(context, [&](Context&) { write_notice(context, text, text_bytes); });
}

int dr_write_size_notice(dr_context* context, uint64_t size, uint64_t senders, uint64_t most,
                         uint64_t rank) {
  return guarded(context, [&](Context&) { write_size_notice(context, size, senders, most, rank); });
}

void dr_make_probe(uint64_t rank, uint32_t fingerprint, uint64_t step, double loss_scale,
                   double* probe) {
  make_probe(rank, fingerprint, step, loss_scale, probe);
}

int dr_scale(dr_context* context, const double* reduced_probe, const uint64_t* ranks,
             uint64_t rank_count, uint32_t fingerprint, uint64_t step, double loss_scale,
             double* scale) {
  return guarded(context, [&](Context&) {
    *scale = scale_of(reduced_probe, ranks, rank_count, fingerprint, step, loss_scale);
  });
}

uint64_t dr_default_max_elements(uint64_t payload_bytes) {
  const uint64_t least = uint64_t{1} << 24, a_byte = 4096;
  if (payload_bytes > kMaxElements / a_byte) return kMaxElements;
  return std::max(least, payload_bytes * a_byte);
}

const dr_stage_row* dr_stage_table(uint32_t number) { return stage_row(number); }

int dr_simd_level(void) { return static_cast<int>(best_simd()); }

}  // extern "C"
