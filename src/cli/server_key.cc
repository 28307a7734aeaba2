#include "cli/server_key.h"

#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "base/file.h"

namespace kt::inline cli {
namespace {

constexpr std::string_view kBlanks = " \t\r\n\v\f";
constexpr const char* kVariable = "KT_API_KEY";
constexpr size_t kMostKeys = 10'000;                         // each request is compared with all
constexpr size_t kLongestKey = 4096;                         // a head of a request holds 32 KiB
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // what some editors put before a text

std::string checked_key(std::string key, const std::string& where) {
  const std::string problem = server_key_problem(key);
  if (!problem.empty()) fail("{}: {}", where, problem);
  return key;
}

}  // namespace

std::string server_key_problem(std::string_view key) {
  if (key.find_first_not_of(kBlanks) == key.npos)
    return "the key is blank, and anyone could use the server; give a key, or leave it out to serve without "
           "one";
  const auto control = [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7F'; };
  if (std::ranges::any_of(key, control))
    return "a key is one line without control characters: no client could send this one";
  if (key.size() > kLongestKey)
    return text("a key of {} characters: at most {} can be sent", key.size(), kLongestKey);
  if (key.front() == ' ' || key.back() == ' ')
    return "the key begins or ends with a blank, which headers lose on their way";
  return "";
}

std::vector<std::string> keys_in_file(const std::string& path) {
  const auto whole = read_small_file(path);
  if (!whole) fail("--api-key-file: {} cannot be read", path);
  std::vector<std::string> out;
  size_t number = 1;
  for (size_t at = whole->starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0; at < whole->size();
       ++number) {
    const size_t stop = std::min(whole->find('\n', at), whole->size());
    std::string line = whole->substr(at, stop - at);
    at = stop + 1;
    const size_t begin = line.find_first_not_of(kBlanks), end = line.find_last_not_of(kBlanks);
    if (begin == line.npos || line[begin] == '#') continue;
    out.push_back(
        checked_key(line.substr(begin, end + 1 - begin), text("--api-key-file: {}:{}", path, number)));
  }
  if (out.empty()) checked_key("", text("--api-key-file: {}", path));
  if (out.size() > kMostKeys)
    fail("--api-key-file: {}: {} keys, at most {} are taken", path, out.size(), kMostKeys);
  return out;
}

std::vector<std::string> server_keys(const KeySources& sources) {
  if (sources.flag) return {checked_key(*sources.flag, "--api-key")};
  if (sources.file) return keys_in_file(*sources.file);
  if (const char* value = std::getenv(kVariable)) return {checked_key(value, kVariable)};
  if (!sources.setting.empty()) return {sources.setting};
  return {};
}

}  // namespace kt::inline cli
