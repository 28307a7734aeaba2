#include "engine/stop_matcher.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/utf8.h"

namespace kt::inline engine {

namespace {
constexpr size_t kMostStops = 64, kMostBytes = 4096;
}  // namespace

StopMatcher::StopMatcher(std::span<const std::string> stops) {
  if (stops.size() > kMostStops) fail("stop: at most {} strings, got {}", kMostStops, stops.size());
  for (size_t i = 0; i < stops.size(); ++i) {
    const std::string& bytes = stops[i];
    if (bytes.empty()) fail("stop: string {} is empty", i);
    if (bytes.size() > kMostBytes)
      fail("stop: string {} has {} bytes, at most {} are allowed", i, bytes.size(), kMostBytes);
    if (!is_valid_utf8(bytes)) fail("stop: string {} is not UTF-8: \"{}\"", i, printable(bytes));
    std::vector<uint32_t> borders(bytes.size());
    for (uint32_t at = 1, length = 0; at < bytes.size(); ++at) {
      while (length > 0 && bytes[at] != bytes[length]) length = borders[length - 1];
      if (bytes[at] == bytes[length]) ++length;
      borders[at] = length;
    }
    stops_.push_back({bytes, std::move(borders)});
  }
}

StopMatcher::Result StopMatcher::push(std::string_view piece) {
  KT_CHECK(!done_, "text after a stop string");
  if (stops_.empty()) return {std::string(piece)};
  for (char byte : piece) {
    held_ += byte;
    std::optional<size_t> found;
    for (size_t i = 0; i < stops_.size(); ++i) {
      Stop& stop = stops_[i];
      while (stop.matched > 0 && stop.bytes[stop.matched] != byte)
        stop.matched = stop.borders[stop.matched - 1];
      if (stop.bytes[stop.matched] == byte) ++stop.matched;
      const bool whole = stop.matched == stop.bytes.size();
      if (whole && (!found || stop.bytes.size() > stops_[*found].bytes.size())) found = i;
    }
    if (found) {
      done_ = true;
      held_.resize(held_.size() - stops_[*found].bytes.size());
      return {std::move(held_), found};
    }
  }
  // A stop string begins with the first byte of a character, so the cut is between characters.
  size_t keep = 0;
  for (const Stop& stop : stops_) keep = std::max<size_t>(keep, stop.matched);
  std::string shown = held_.substr(0, held_.size() - keep);
  held_.erase(0, shown.size());
  return {std::move(shown)};
}

std::string StopMatcher::flush() {
  for (Stop& stop : stops_) stop.matched = 0;
  return std::exchange(held_, {});
}

}  // namespace kt::inline engine
