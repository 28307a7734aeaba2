// Log lines for people: one process-wide sink, and nothing else. No files, no rotation, no timestamps.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/text.h"

namespace kt::inline base {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// "debug", "info", "warning", "error"; nullopt for any other word.
std::optional<LogLevel> parse_log_level(std::string_view word);
std::string_view log_level_name(LogLevel level);

// Lines below the level are dropped before they are formatted. The start value is KT_LOG_LEVEL's, else
// kWarning.
void set_log_level(LogLevel level);
LogLevel log_level();

using LogSink = std::function<void(LogLevel, std::string_view)>;

// Replaces the sink; an empty function brings back the default one, which writes "kt warning: line" to
// stderr. The sink is called from any thread, possibly from several at once, and not under a lock of ours: a
// sink that takes an interpreter's lock must not deadlock with a thread that logs while holding it. So a call
// to the old sink may still be running when this returns. What a sink throws is dropped.
void set_log_sink(LogSink sink);

// Hands one finished line to the sink if its level is high enough. Never throws.
void log_line(LogLevel level, std::string_view line) noexcept;

// Hands the line to the sink the first time that this very text is logged, whoever logs it. For "a slower
// path was taken": cheap enough for setup code, not for loops (formats and takes a lock every time).
void log_line_once(LogLevel level, const std::string& line) noexcept;

template <typename... Args>
void log_once(LogLevel level, TextPattern<sizeof...(Args)> pattern, const Args&... args) {
  if (level >= log_level()) log_line_once(level, text(pattern, args...));
}

}  // namespace kt::inline base

// KT_LOG(LogLevel::kInfo, "{} experts", n): arguments are evaluated only if the level is on.
#define KT_LOG(level, ...)                                                                          \
  do {                                                                                              \
    const ::kt::LogLevel kt_log_level_ = (level);                                                   \
    if (kt_log_level_ >= ::kt::log_level()) ::kt::log_line(kt_log_level_, ::kt::text(__VA_ARGS__)); \
  } while (false)
