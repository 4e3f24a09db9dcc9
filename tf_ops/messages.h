// Parts that the decoding kernels share: find one variable's payloads in the gathered messages of
// all ranks.
#ifndef DEEPREDUCE_TF_OPS_MESSAGES_H
#define DEEPREDUCE_TF_OPS_MESSAGES_H

#include <string>
#include <vector>

#include "core.h"

namespace deepreduce_tf {

inline std::string named(const std::string& variable, const std::string& message) {
  return variable.empty() ? message : absl::StrCat("parameter ", variable, ": ", message);
}

inline const uint8_t* bytes_of(const Tensor& tensor) {
  return static_cast<const uint8_t*>(tensor.data());
}

// Calls use(number, first byte, dr_message) for each of the concatenated messages.
template <class Use>
absl::Status for_each_message(Call& call, const Tensor& messages, const std::string& variable,
                              Use use) {
  const uint8_t* at = bytes_of(messages);
  const uint8_t* const end = at + messages.NumElements();
  for (int64_t number = 0; at < end; ++number) {
    dr_message message;
    const int status =
        dr_read_message(&call.context, at, static_cast<uint64_t>(end - at), &message);
    if (status != DR_OK)
      return status_of(
          status, named(variable, absl::StrCat("message ", number, ": ", call.context.message)));
    use(number, at, message);
    at += message.bytes;
  }
  return absl::OkStatus();
}

// Returns the text of a rank's notice for a status: bytes that are not UTF-8 become '?'.
inline std::string readable(const uint8_t* text, uint64_t bytes) {
  std::string out;
  for (uint64_t i = 0; i < bytes;) {
    const uint8_t first = text[i];
    const uint64_t length = first < 0x80                    ? 1
                            : first >= 0xC2 && first < 0xE0 ? 2
                            : first >= 0xE0 && first < 0xF0 ? 3
                            : first >= 0xF0 && first < 0xF5 ? 4
                                                            : 0;
    bool valid = length != 0 && length <= bytes - i;
    for (uint64_t j = 1; valid && j < length; ++j) valid = (text[i + j] & 0xC0) == 0x80;
    // valid only if it is the shortest form, not a UTF-16 surrogate, and not above the last code
    // point
    if (valid && length > 2) {
      const uint8_t second = text[i + 1];
      valid = !(first == 0xE0 && second < 0xA0) && !(first == 0xED && second >= 0xA0) &&
              !(first == 0xF0 && second < 0x90) && !(first == 0xF4 && second >= 0x90);
    }
    if (valid)
      out.append(reinterpret_cast<const char*>(text + i), length);
    else
      out.push_back('?');
    i += valid ? length : 1;
  }
  return out;
}

// Each of `ranks` ranks sends `members` messages; number `member` is this variable's.
struct OneVariablesPayloads {
  int64_t ranks = 1, member = 0, members = 1;
  std::vector<const uint8_t*> data;
  std::vector<uint64_t> sizes;
  bool non_finite = false;  // whether one of them is non-finite

  // `count`: scalar number of ranks; `own`: number of the wanted message among the `of` messages of
  // each rank.
  absl::Status expect(const Tensor& count, int64_t own = 0, int64_t of = 1) {
    if (count.dims() != 0 || count.scalar<int32_t>()() < 1)
      return absl::InvalidArgumentError(absl::StrCat("ranks: expected a number of at least 1, got ",
                                                     count.SummarizeValue(1), " of shape ",
                                                     count.shape().DebugString()));
    ranks = count.scalar<int32_t>()();
    member = own;
    members = of;
    return absl::OkStatus();
  }

  // Splits messages in host memory. A notice makes every rank fail.
  absl::Status split(Call& call, const Tensor& messages, const std::string& variable) {
    std::string notices;
    int64_t count = 0;
    TF_RETURN_IF_ERROR(for_each_message(
        call, messages, variable,
        [&](int64_t number, const uint8_t* at, const dr_message& message) {
          if (message.text != nullptr) {
            absl::StrAppend(&notices, notices.empty() ? "" : "; ", "rank ", number / members, ": ",
                            readable(message.text, message.text_bytes));
          } else if (number % members == member) {
            add(at, message.bytes);
            non_finite |= message.non_finite != 0;
          }
          ++count;
        }));
    if (!notices.empty()) return absl::AbortedError(named(variable, notices));
    return check_count(count, variable);
  }

  // Splits messages of known lengths, in memory of host or device.
  absl::Status split_by(const Tensor& lengths, const Tensor& messages,
                        const std::string& variable) {
    const auto length = lengths.flat<int64_t>();
    uint64_t left = static_cast<uint64_t>(messages.NumElements());
    for (int64_t number = 0; number < lengths.NumElements(); ++number) {
      if (length(number) < 0 || static_cast<uint64_t>(length(number)) > left)
        return absl::DataLossError(
            named(variable, absl::StrCat("message ", number, ": expected at most ", left,
                                         " bytes, got ", length(number))));
      const uint64_t bytes = static_cast<uint64_t>(length(number));
      if (number % members == member)
        add(bytes_of(messages) + (static_cast<uint64_t>(messages.NumElements()) - left), bytes);
      left -= bytes;
    }
    if (left != 0)
      return absl::DataLossError(
          named(variable, absl::StrCat("expected messages of ", messages.NumElements(),
                                       " bytes in total, got ", left, " fewer")));
    return check_count(lengths.NumElements(), variable);
  }

 private:
  void add(const uint8_t* at, uint64_t bytes) {
    data.push_back(at);
    sizes.push_back(bytes);
  }

  absl::Status check_count(int64_t count, const std::string& variable) const {
    if (count == ranks * members) return absl::OkStatus();
    return absl::DataLossError(
        named(variable, absl::StrCat("expected ", members, " messages of each of ", ranks,
                                     " ranks, got ", count, " in all")));
  }
};

}  // namespace deepreduce_tf
#endif
