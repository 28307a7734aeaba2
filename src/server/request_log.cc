#include "server/request_log.h"

#include <array>
#include <cstdio>

#include "base/text.h"
#include "base/utf8.h"
#include "server/metrics.h"

namespace kt::inline server {
namespace {

constexpr size_t kLongestPath = 200;

// Whatever a client put there stays one word.
std::string one_word(const std::string& untrusted) {
  if (untrusted.empty()) return "-";
  std::string out;
  for (const char c : printable(untrusted, kLongestPath)) {
    if (c == ' ')
      out += "%20";
    else
      out += c;
  }
  return out;
}

std::string utc_text(std::time_t when) {
  std::tm parts{};
  std::array<char, 32> out{};
  ::gmtime_r(&when, &parts);
  std::strftime(out.data(), out.size(), "%FT%TZ", &parts);
  return out.data();
}

}  // namespace

std::string request_line(const HttpRecord& record, std::time_t now) {
  std::array<char, 32> milliseconds{};
  std::snprintf(milliseconds.data(), milliseconds.size(), "%.1f", record.seconds * 1e3);
  return text("{} {} {} {} {} tokens={} ms={}", utc_text(now), record.client, one_word(record.method),
              one_word(record.path), record.whole ? record.status : kClientLeft,
              record.note.empty() ? "-" : record.note, milliseconds.data());
}

}  // namespace kt::inline server
