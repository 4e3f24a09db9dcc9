#include "container/wire.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "container/payload.h"
#include "support/random.h"

namespace deepreduce {
namespace {

constexpr char kNoticeMagic[4] = {'D', 'R', 'E', 'R'};
constexpr uint64_t kNoticeHeaderBytes = 8;  // magic, length of the text
constexpr uint64_t kLongestText = 4096;
// relative error of a float32 sum over up to 64 ranks, with factors before and after it
constexpr double kRounding = 2e-6;
// relative error per rank if there are more: that of one addition, averaged over the additions
constexpr double kHalfUlp = 1.0 / (1 << 25);
// Rank terms and marks are not much larger than one, so that the rank terms make the probes of two
// ranks differ in direction. Adasum averages nearly parallel vectors and would otherwise look like
// an average.
constexpr double kRankUnit = 1.0 / (1 << 19);
constexpr double kMarkUnit = 1.0 / 65536;

// Returns a 32-bit mark of configuration, step and loss scale (0 for none). With one configuration
// and loss scale, steps within one block of 2^32 never have the same mark. Marks of close steps
// differ widely in both halves, so every rank sees a difference in the sum over many ranks. The
// step is multiplied by an odd number (2^32 divided by the golden ratio) and its halves are mixed;
// both operations are invertible. Different loss scales give random marks.
uint32_t mark_of(uint32_t fingerprint, uint64_t step, double loss_scale) {
  uint32_t mixed =
      (static_cast<uint32_t>(step) ^ static_cast<uint32_t>(mix64(step >> 32))) * 0x9E3779B1u;
  mixed ^= mixed >> 16;
  uint64_t scale_bits;
  std::memcpy(&scale_bits, &loss_scale, sizeof(scale_bits));
  const uint32_t of_scale = loss_scale == 0 ? 0 : static_cast<uint32_t>(mix64(scale_bits) >> 32);
  return fingerprint + mixed + of_scale;
}

// Returns the term of a global rank in a probe, of 20 bits. It shows missing ranks: the mean of the
// terms of the others differs. If terms were linear in the rank, a sum without the middle rank
// would look like one of all ranks. The terms of half of the ranks are close to 0, those of the
// others close to 2. So no rank is close to the mean of many ranks, whose sum in float32 is not
// exact.
double rank_term(uint64_t rank) {
  const uint64_t random = mix64(rank) >> 47;
  return static_cast<double>(1 + (random & 0xFFFF) + (random >> 16) * (15 << 16)) * kRankUnit;
}

struct Halves {
  explicit Halves(uint32_t mark)
      : low((mark & 0xFFFF) * kMarkUnit), high((mark >> 16) * kMarkUnit) {}
  double low, high;
};

// Writes a notice with a text of at most kLongestText bytes.
void put_notice(dr_context* context, const char* text, uint32_t length) {
  uint8_t* out = static_cast<uint8_t*>(context->output(context->user, kNoticeHeaderBytes + length));
  if (out == nullptr) Arena::out_of_memory(kNoticeHeaderBytes + length, 1);
  std::memcpy(out, kNoticeMagic, sizeof(kNoticeMagic));
  std::memcpy(out + 4, &length, sizeof(length));
  std::memcpy(out + kNoticeHeaderBytes, text, length);
}

}  // namespace

dr_message read_message(const uint8_t* messages, uint64_t size) {
  if (size >= kNoticeHeaderBytes &&
      std::memcmp(messages, kNoticeMagic, sizeof(kNoticeMagic)) == 0) {
    uint32_t length;
    std::memcpy(&length, messages + 4, sizeof(length));
    const uint64_t most = std::min(kLongestText, size - kNoticeHeaderBytes);
    if (length > most)
      corrupt_payload("notice: expected at most %llu bytes, got %u",
                      static_cast<unsigned long long>(most), length);
    return {kNoticeHeaderBytes + length, 0, messages + kNoticeHeaderBytes, length};
  }
  const PayloadStart start = read_start(messages, size);
  // nobody decodes such a payload, so a damaged one would count as a gradient with NaN
  if (start.non_finite) read_payload(Simd::scalar, messages, start.total_bytes);
  return {start.total_bytes, start.non_finite ? 1 : 0, nullptr, 0};
}

void write_notice(dr_context* context, const char* text, uint64_t text_bytes) {
  uint32_t length = static_cast<uint32_t>(text_bytes < kLongestText ? text_bytes : kLongestText);
  if (length < text_bytes)  // not within a UTF-8 character
    while (length > kLongestText - 4 && (static_cast<uint8_t>(text[length]) & 0xC0) == 0x80)
      --length;
  put_notice(context, text, length);
}

void write_size_notice(dr_context* context, uint64_t size, uint64_t senders, uint64_t most,
                       uint64_t rank) {
  using Number = unsigned long long;
  char text[512];
  const int length = std::snprintf(
      text, sizeof(text),
      "InvalidArgumentError: messages of rank %llu: expected at most %llu bytes, because Horovod can "
      "bring %llu bytes to a rank, from %llu ranks in total, got %llu; use smaller buckets "
      "(bucket_bytes=), send fewer elements, or use another communicator",
      static_cast<Number>(rank), static_cast<Number>(most / senders), static_cast<Number>(most),
      static_cast<Number>(senders), static_cast<Number>(size));
  put_notice(context, text, static_cast<uint32_t>(length));
}

void make_probe(uint64_t rank, uint32_t fingerprint, uint64_t step, double loss_scale,
                double* probe) {
  const Halves mark(mark_of(fingerprint, step, loss_scale));
  probe[0] = 1.0;
  probe[1] = rank_term(rank);
  probe[2] = mark.low;
  probe[3] = mark.high;
}

double scale_of(const double* reduced_probe, const uint64_t* ranks, uint64_t rank_count,
                uint32_t fingerprint, uint64_t step, double loss_scale) {
  const double rounding = std::max(kRounding, kHalfUlp * static_cast<double>(rank_count));
  const auto close = [rounding](double got, double expected) {
    return std::fabs(got - expected) <= rounding * std::fabs(expected);
  };
  const double scale = reduced_probe[0] / static_cast<double>(rank_count);
  double terms = 0;
  for (uint64_t i = 0; i < rank_count; ++i) terms += rank_term(ranks[i]);
  if (!close(reduced_probe[1], scale * terms))
    invalid_argument(
        "expected Horovod to sum or average over the %llu ranks of the compressor's process set, got another operation or "
        "another set; give both the same process_set, op=Average or op=Sum, and all ranks the same number of batches, without hvd.join()",
        static_cast<unsigned long long>(rank_count));
  const Halves mark(mark_of(fingerprint, step, loss_scale));
  if (!close(reduced_probe[2], reduced_probe[0] * mark.low) ||
      !close(reduced_probe[3], reduced_probe[0] * mark.high)) {
    char of_scale[64] = "";
    if (loss_scale != 0)
      std::snprintf(of_scale, sizeof(of_scale), "; the loss scale here is %g", loss_scale);
    invalid_argument(
        "expected the same compressor configuration on every rank, at the same step, got different ones "
        "(here configuration %08x at step %llu); give every rank the same settings and named parameters, "
        "freeze the same ones, and load a state on all ranks or broadcast it%s",
        fingerprint, static_cast<unsigned long long>(step), of_scale);
  }
  return scale;
}

}  // namespace deepreduce
