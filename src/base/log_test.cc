#include "base/log.h"

#include <gmock/gmock.h>

#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace kt::inline base {
namespace {

using testing::ElementsAre;

// Collects lines while it lives, then brings back the default sink and level.
class Log : public testing::Test {
 protected:
  Log() {
    set_log_sink([this](LogLevel level, std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines_.push_back(text("{}: {}", log_level_name(level), line));
    });
  }
  ~Log() override {
    set_log_sink({});
    set_log_level(before_);
  }

  LogLevel before_ = log_level();
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

TEST_F(Log, DropsWhatIsBelowTheLevel) {
  set_log_level(LogLevel::kWarning);
  int calls = 0;
  KT_LOG(LogLevel::kInfo, "{}", ++calls);
  KT_LOG(LogLevel::kWarning, "{} left", 2);
  KT_LOG(LogLevel::kError, "gone");
  EXPECT_EQ(calls, 0);
  EXPECT_THAT(lines_, ElementsAre("warning: 2 left", "error: gone"));
}

TEST_F(Log, OnceIsOncePerText) {
  set_log_level(LogLevel::kWarning);
  for (int i = 0; i < 4; ++i) log_once(LogLevel::kWarning, "log_test: path {}", i % 2);
  EXPECT_THAT(lines_, ElementsAre("warning: log_test: path 0", "warning: log_test: path 1"));
}

TEST_F(Log, LinesAreHarmless) {
  set_log_level(LogLevel::kWarning);
  KT_LOG(LogLevel::kWarning, "{}", "\x1b]0;title\x07\n");
  EXPECT_THAT(lines_, ElementsAre("warning: \\x1b]0;title\\x07\\x0a"));
  KT_LOG(LogLevel::kWarning, "{}", std::string(1'000'000, 'x'));
  EXPECT_LT(lines_.back().size(), 3100u);
}

TEST_F(Log, SinkMayThrowAndMayLog) {
  set_log_level(LogLevel::kWarning);
  int depth = 0;
  set_log_sink([&](LogLevel, std::string_view) {
    if (depth++ == 0) KT_LOG(LogLevel::kError, "from the sink");
    throw std::runtime_error("sink");
  });
  KT_LOG(LogLevel::kError, "outer");
  EXPECT_EQ(depth, 2);
}

TEST_F(Log, FromSeveralThreads) {
  set_log_level(LogLevel::kInfo);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([] {
      for (int i = 0; i < 100; ++i) KT_LOG(LogLevel::kInfo, "line");
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(lines_.size(), 400u);
}

TEST_F(Log, DefaultSinkWritesToStderr) {
  set_log_level(LogLevel::kWarning);
  set_log_sink({});
  testing::internal::CaptureStderr();
  KT_LOG(LogLevel::kWarning, "slow {}", "path");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "kt warning: slow path\n");
}

TEST(LogLevelNames, RoundTrip) {
  for (const LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError})
    EXPECT_EQ(parse_log_level(log_level_name(level)), level);
  EXPECT_EQ(parse_log_level("loud"), std::nullopt);
}

}  // namespace
}  // namespace kt::inline base
