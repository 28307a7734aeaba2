#include "cli/server_key.h"

#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "base/file.h"

namespace kt {
namespace {

constexpr std::string_view kBlanks = " \t\r\n\v\f";
constexpr const char* kVariable = "KT_API_KEY";

std::string checked_key(std::string key, const std::string& where) {
  const std::string problem = server_key_problem(key);
  if (!problem.empty()) fail("{}: {}", where, problem);
  return key;
}

std::string key_in_file(const std::string& path) {
  const auto whole = read_small_file(path);
  if (!whole) fail("--api-key-file: {} cannot be read", path);
  const size_t begin = whole->find_first_not_of(kBlanks), end = whole->find_last_not_of(kBlanks);
  return checked_key(begin == whole->npos ? "" : whole->substr(begin, end + 1 - begin),
                     text("--api-key-file: {}", path));
}

}  // namespace

std::string server_key_problem(std::string_view key) {
  if (key.find_first_not_of(kBlanks) == key.npos)
    return "the key is blank, and anyone could use the server; give a key, or leave it out to serve without "
           "one";
  const auto control = [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7F'; };
  if (std::ranges::any_of(key, control))
    return "a key is one line without control characters: no client could send this one";
  if (key.front() == ' ' || key.back() == ' ')
    return "the key begins or ends with a blank, which headers lose on their way";
  return "";
}

std::string server_key(const KeySources& sources) {
  if (sources.flag) return checked_key(*sources.flag, "--api-key");
  if (sources.file) return key_in_file(*sources.file);
  if (const char* value = std::getenv(kVariable)) return checked_key(value, kVariable);
  return sources.setting;
}

}  // namespace kt
