#include "wire.h"

#include <cmath>

#include "payload.h"

namespace deepreduce {
namespace {

constexpr char kNoticeMagic[4] = {'D', 'R', 'E', 'R'};
constexpr uint64_t kNoticeHeaderBytes = 8;  // the magic, the text's length
constexpr uint64_t kLongestText = 4096;
constexpr double kRounding = 2e-6;  // of a float32 sum over many ranks
// Below one, so that ranks make the probes of two ranks differ in direction: Adasum averages what is all but parallel, and would pass for an average.
constexpr double kFingerprintUnit = 1.0 / 65536;

}  // namespace

dr_message read_message(const uint8_t* messages, uint64_t size) {
  if (size >= kNoticeHeaderBytes && std::memcmp(messages, kNoticeMagic, sizeof(kNoticeMagic)) == 0) {
    uint32_t length;
    std::memcpy(&length, messages + 4, sizeof(length));
    if (length > kLongestText || length > size - kNoticeHeaderBytes)
      corrupt_payload("notice: expected at most %llu bytes, got %u", static_cast<unsigned long long>(size - kNoticeHeaderBytes), length);
    return {kNoticeHeaderBytes + length, 0, messages + kNoticeHeaderBytes, length};
  }
  const PayloadStart start = read_start(messages, size);
  return {start.total_bytes, start.non_finite ? 1 : 0, nullptr, 0};
}

void write_notice(dr_context* context, const char* text, uint64_t text_bytes) {
  const uint32_t length = static_cast<uint32_t>(text_bytes < kLongestText ? text_bytes : kLongestText);
  uint8_t* out = static_cast<uint8_t*>(context->output(context->user, kNoticeHeaderBytes + length));
  if (out == nullptr) Arena::out_of_memory(kNoticeHeaderBytes + length, 1);
  std::memcpy(out, kNoticeMagic, sizeof(kNoticeMagic));
  std::memcpy(out + 4, &length, sizeof(length));
  std::memcpy(out + kNoticeHeaderBytes, text, length);
}

void make_probe(uint64_t rank, uint32_t fingerprint, double* probe) {
  probe[0] = 1.0;
  probe[1] = static_cast<double>(rank + 1);
  probe[2] = (fingerprint & 0xFFFF) * kFingerprintUnit;
  probe[3] = (fingerprint >> 16) * kFingerprintUnit;
}

double scale_of(const double* reduced_probe, uint64_t rank_count, uint64_t rank_sum, uint32_t fingerprint) {
  const auto close = [](double got, double expected) { return std::fabs(got - expected) <= kRounding * std::fabs(expected); };
  const double scale = reduced_probe[0] / static_cast<double>(rank_count);
  if (!close(reduced_probe[1], scale * static_cast<double>(rank_sum)))
    invalid_argument("expected Horovod to sum or average over the %llu ranks of the compressor's process set, got another operation or "
                     "another set; give both the same process_set, and op=Average or op=Sum",
                     static_cast<unsigned long long>(rank_count));
  const double low = (fingerprint & 0xFFFF) * kFingerprintUnit, high = (fingerprint >> 16) * kFingerprintUnit;
  if (!close(reduced_probe[2], reduced_probe[0] * low) || !close(reduced_probe[3], reduced_probe[0] * high))
    invalid_argument("expected the same compressor configuration on every rank, got different ones; codec, memory, communicator, seed, "
                     "dense_below and the named parameters with their shapes must be equal (fingerprint here: %08x)",
                     fingerprint);
  return scale;
}

}  // namespace deepreduce
