#include "base/log.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>

#include "base/fork_mutex.h"
#include "base/utf8.h"

namespace kt::inline base {

namespace {

struct Log {
  std::atomic<LogLevel> level;
  ForkMutex mutex{ForkLock::kLog};      // guards the two below
  std::shared_ptr<const LogSink> sink;  // null: stderr
  std::set<std::string> seen;           // lines of log_line_once

  Log() : level(LogLevel::kWarning) {
    const char* word = std::getenv("KT_LOG_LEVEL");
    if (word == nullptr) return;
    if (const auto wanted = parse_log_level(word)) level = *wanted;
  }
};

// Never destroyed, so that threads and static destructors may log to the very end.
Log& the_log() {
  static Log& log = *std::make_unique<Log>().release();
  return log;
}

[[maybe_unused]] const Log& made_early = the_log();  // before threads that fork

void write_to_stderr(LogLevel level, std::string_view line) {
  // One call, so that lines of several threads do not mix.
  std::fputs(text("kt {}: {}\n", log_level_name(level), line).c_str(), stderr);
}

}  // namespace

std::optional<LogLevel> parse_log_level(std::string_view word) {
  for (const LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError})
    if (word == log_level_name(level)) return level;
  return std::nullopt;
}

std::string_view log_level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "unknown";
}

void set_log_level(LogLevel level) { the_log().level.store(level, std::memory_order_relaxed); }

LogLevel log_level() { return the_log().level.load(std::memory_order_relaxed); }

void set_log_sink(LogSink sink) {
  auto owned = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
  Log& log = the_log();
  // The old sink is destroyed after the lock is released: its destructor may be anyone's code.
  const std::lock_guard lock(log.mutex);
  log.sink.swap(owned);
}

void log_line(LogLevel level, std::string_view line) noexcept {
  try {
    Log& log = the_log();
    if (level < log.level.load(std::memory_order_relaxed)) return;
    std::shared_ptr<const LogSink> sink;
    {
      const std::lock_guard lock(log.mutex);
      sink = log.sink;
    }
    const std::string shown = message_line(line);
    if (sink)
      (*sink)(level, shown);
    else
      write_to_stderr(level, shown);
  } catch (...) {
    // A log line that cannot be delivered is lost; failing the work it describes would be worse.
  }
}

void log_line_once(LogLevel level, const std::string& line) noexcept {
  try {
    Log& log = the_log();
    {
      const std::lock_guard lock(log.mutex);
      if (!log.seen.insert(line).second) return;
    }
    log_line(level, line);
  } catch (...) {
    // Lost, as above.
  }
}

}  // namespace kt::inline base
