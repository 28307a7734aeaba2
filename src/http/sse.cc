#include "http/client.h"

namespace kt::inline http {

std::vector<std::string> SseReader::push(std::string_view piece) {
  constexpr std::string_view kField = "data";
  std::vector<std::string> events;
  for (const char c : piece) {
    const bool second_half = std::exchange(after_return_, c == '\r') && c == '\n';
    if (second_half) continue;
    if (c != '\r' && c != '\n') {
      line_ += c;
      continue;
    }
    const std::string_view line = line_;
    if (line.empty()) {
      if (std::exchange(has_data_, false)) events.push_back(std::exchange(data_, {}));
      continue;
    }
    const size_t colon = line.find(':');
    if (line.substr(0, colon) == kField) {
      std::string_view value = colon == std::string_view::npos ? "" : line.substr(colon + 1);
      if (value.starts_with(' ')) value.remove_prefix(1);
      if (std::exchange(has_data_, true)) data_ += '\n';
      data_ += value;
    }
    line_.clear();
  }
  return events;
}

}  // namespace kt::inline http
