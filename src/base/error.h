// The one exception type, and the three ways to throw it. Nothing here prints or aborts.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "base/text.h"

namespace kt::inline base {

// What went wrong, by who can mend it. The values are the exit codes of the command line.
enum class ErrorKind {
  kInput = 2,        // the caller's: arguments, files, shapes
  kMemory = 3,       // memory or disk is too small for what was asked
  kUnsupported = 4,  // valid, but not on this machine or not in this build
  kInternal = 5,     // ours: a broken promise between two parts of this code
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

// Throws Error(kind) with text(pattern, args...): what was expected, what came, and the name. An option that
// would help is named in backticks, `max_memory`: the words of every caller but kt, which shows its flag.
template <typename... Args>
[[noreturn, gnu::cold, gnu::noinline]] void fail_as(ErrorKind kind, TextPattern<sizeof...(Args)> pattern,
                                                    const Args&... args) {
  throw Error(kind, text(pattern, args...));
}

// fail_as(kInput, ...): the caller can cause it.
template <typename... Args>
[[noreturn, gnu::cold, gnu::noinline]] void fail(TextPattern<sizeof...(Args)> pattern, const Args&... args) {
  throw Error(ErrorKind::kInput, text(pattern, args...));
}

// Throws Error(kInternal) "folder/file.cc:12: check failed: condition: message". KT_CHECK calls it.
[[noreturn, gnu::cold]] void check_failed(const char* file, int line, const char* condition,
                                          const std::string& message = {});

}  // namespace kt::inline base

// KT_CHECK(condition, pattern, args...): throws when the condition is false; the pattern may be left out. For
// what only we can break. Arguments are evaluated only on failure.
#define KT_CHECK(condition, ...)                                                                \
  do {                                                                                          \
    if (!(condition)) [[unlikely]]                                                              \
      ::kt::check_failed(__FILE__, __LINE__, #condition __VA_OPT__(, ::kt::text(__VA_ARGS__))); \
  } while (false)

// KT_DCHECK: a KT_CHECK for hot paths, alive in unoptimised and sanitizer builds, or where the build defines
// KT_DCHECKS; elsewhere the condition is compiled but not evaluated.
#if defined(KT_DCHECKS) || !defined(__OPTIMIZE__) || defined(__SANITIZE_ADDRESS__) || \
    defined(__SANITIZE_THREAD__)
#define KT_DCHECK(condition, ...) KT_CHECK(condition __VA_OPT__(, ) __VA_ARGS__)
#else
#define KT_DCHECK(condition, ...) \
  do {                            \
    if (false) (void)(condition); \
  } while (false)
#endif
