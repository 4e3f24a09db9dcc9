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

struct OneVariablesPayloads {
  std::vector<const uint8_t*> data;
  std::vector<uint64_t> sizes;
  bool non_finite = false;  // one of them

  // Each rank sends `members` messages, of which the one numbered `member` is this variable's; a notice is every rank's failure.
  absl::Status split(Call& call, const Tensor& messages, int64_t member, int64_t members, const std::string& variable) {
    const uint8_t* at = messages.flat<uint8_t>().data();
    const uint8_t* const end = at + messages.NumElements();
    std::string notices;
    int64_t number = 0;
    for (; at < end; ++number) {
      dr_message message;
      const int status = dr_read_message(&call.context, at, static_cast<uint64_t>(end - at), &message);
      if (status != DR_OK) return status_of(status, named(variable, absl::StrCat("message ", number, ": ", call.context.message)));
      if (message.text != nullptr) {
        absl::StrAppend(&notices, notices.empty() ? "" : "; ", "rank ", number / members, ": ",
                        absl::string_view(reinterpret_cast<const char*>(message.text), message.text_bytes));
      } else if (number % members == member) {
        data.push_back(at);
        sizes.push_back(message.bytes);
        non_finite |= message.non_finite != 0;
      }
      at += message.bytes;
    }
    if (!notices.empty()) return absl::AbortedError(named(variable, notices));
    if (number % members != 0)
      return absl::DataLossError(named(variable, absl::StrCat("expected ", members, " messages of each rank, got ", number, " in all")));
    return absl::OkStatus();
  }
};

}  // namespace deepreduce_tf
#endif
