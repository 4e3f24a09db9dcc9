// What the decoding kernels share: one variable's payloads among the gathered messages of all ranks.
#ifndef DEEPREDUCE_TF_OPS_MESSAGES_H
#define DEEPREDUCE_TF_OPS_MESSAGES_H

#include <string>
#include <vector>

#include "core.h"

namespace deepreduce_tf {

inline std::string named(const std::string& variable, const std::string& message) {
  return variable.empty() ? message : absl::StrCat("parameter ", variable, ": ", message);
}

inline const uint8_t* bytes_of(const Tensor& tensor) { return static_cast<const uint8_t*>(tensor.data()); }

// use(number, its first byte, what it is) for each of the messages that lie one after another.
template <class Use>
absl::Status for_each_message(Call& call, const Tensor& messages, const std::string& variable, Use use) {
  const uint8_t* at = bytes_of(messages);
  const uint8_t* const end = at + messages.NumElements();
  for (int64_t number = 0; at < end; ++number) {
    dr_message message;
    const int status = dr_read_message(&call.context, at, static_cast<uint64_t>(end - at), &message);
    if (status != DR_OK) return status_of(status, named(variable, absl::StrCat("message ", number, ": ", call.context.message)));
    use(number, at, message);
    at += message.bytes;
  }
  return absl::OkStatus();
}

// Each rank sends `members` messages, of which the one numbered `member` is this variable's.
struct OneVariablesPayloads {
  std::vector<const uint8_t*> data;
  std::vector<uint64_t> sizes;
  bool non_finite = false;  // one of them

  // Of messages in host memory; a notice is every rank's failure.
  absl::Status split(Call& call, const Tensor& messages, int64_t member, int64_t members, const std::string& variable) {
    std::string notices;
    int64_t count = 0;
    TF_RETURN_IF_ERROR(for_each_message(call, messages, variable, [&](int64_t number, const uint8_t* at, const dr_message& message) {
      if (message.text != nullptr) {
        absl::StrAppend(&notices, notices.empty() ? "" : "; ", "rank ", number / members, ": ",
                        absl::string_view(reinterpret_cast<const char*>(message.text), message.text_bytes));
      } else if (number % members == member) {
        add(at, message.bytes);
        non_finite |= message.non_finite != 0;
      }
      ++count;
    }));
    if (!notices.empty()) return absl::AbortedError(named(variable, notices));
    return check_count(count, members, variable);
  }

  // Of messages of known lengths, wherever they are.
  absl::Status split_by(const Tensor& lengths, const Tensor& messages, int64_t member, int64_t members, const std::string& variable) {
    const auto length = lengths.flat<int64_t>();
    uint64_t left = static_cast<uint64_t>(messages.NumElements());
    for (int64_t number = 0; number < lengths.NumElements(); ++number) {
      if (length(number) < 0 || static_cast<uint64_t>(length(number)) > left)
        return absl::DataLossError(named(variable, absl::StrCat("message ", number, ": expected at most ", left, " bytes, got ", length(number))));
      const uint64_t bytes = static_cast<uint64_t>(length(number));
      if (number % members == member) add(bytes_of(messages) + (static_cast<uint64_t>(messages.NumElements()) - left), bytes);
      left -= bytes;
    }
    if (left != 0)
      return absl::DataLossError(named(variable, absl::StrCat("expected messages of ", messages.NumElements(), " bytes in all, got ", left, " less")));
    return check_count(lengths.NumElements(), members, variable);
  }

 private:
  void add(const uint8_t* at, uint64_t bytes) {
    data.push_back(at);
    sizes.push_back(bytes);
  }

  static absl::Status check_count(int64_t count, int64_t members, const std::string& variable) {
    if (count % members == 0) return absl::OkStatus();
    return absl::DataLossError(named(variable, absl::StrCat("expected ", members, " messages of each rank, got ", count, " in all")));
  }
};

}  // namespace deepreduce_tf
#endif
