#include "base/error.h"

namespace kt::inline base {

namespace {

// "folder/file.cc": where the source lay when it was built is nobody's business.
std::string_view last_two_parts(std::string_view path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string_view::npos || slash == 0) return path;
  const size_t before = path.rfind('/', slash - 1);
  return before == std::string_view::npos ? path : path.substr(before + 1);
}

}  // namespace

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  std::string what = text("{}:{}: check failed: {}", last_two_parts(file), line, condition);
  if (!message.empty()) what += ": " + message;
  throw Error(ErrorKind::kInternal, what);
}

}  // namespace kt::inline base
