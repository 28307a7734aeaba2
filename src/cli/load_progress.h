// What kt run shows while a model is read.
#pragma once
#include <chrono>
#include <string>

#include "base/text.h"
#include "terminal/report.h"

namespace kt::inline cli {

// One line while layers are read: how far, how fast, how long still.
class LoadProgress {
 public:
  explicit LoadProgress(double bytes) : bytes_(bytes) {}
  void show(int done, int total) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const double share = static_cast<double>(done) / total;
    constexpr int kWidth = 24;
    const int filled = static_cast<int>(share * kWidth);
    std::string bar;
    for (int i = 0; i < kWidth; ++i) bar += i < filled ? "#" : ".";
    status_.show(text("loading [{}] layer {} of {}, {} GB/s, {} s left", bar, done, total,
                      three_digits(bytes_ * share / seconds * 1e-9),
                      three_digits(seconds / share - seconds)));
  }

  void end() { status_.show(""); }

 private:
  double bytes_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  StatusLine status_;
};

}  // namespace kt::inline cli
