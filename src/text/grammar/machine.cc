#include "text/grammar/machine.h"

#include <algorithm>

#include "base/error.h"

namespace kt::inline texts {
namespace {

constexpr size_t kMostThreads = 8192;    // of one set, calls followed
constexpr size_t kMostConfigs = 30'000;  // between two calls of forget_but
constexpr size_t kMostWeight = 4'000'000;
constexpr size_t kMostWork = 60'000'000;  // edges looked at, some tenths of a second
constexpr int32_t kDeepestCalls = 600;    // calls within each other; some three for each level of JSON

size_t mixed(uint64_t a, uint64_t b) {
  uint64_t x = (a ^ b * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
  return x ^ x >> 29;
}

uint64_t key_of(const Thread& thread) {
  return uint64_t{static_cast<uint32_t>(thread.state)} << 32 | static_cast<uint32_t>(thread.stack);
}

}  // namespace

size_t GrammarMachine::Hash::operator()(const std::vector<Thread>& threads) const {
  size_t hash = threads.size();
  for (const Thread& thread : threads) hash = mixed(key_of(thread), hash);
  return hash;
}

size_t GrammarMachine::Hash::operator()(const Frame& frame) const {
  return mixed(key_of({frame.back, frame.below}), 1);
}

GrammarMachine::GrammarMachine(Grammar rules) : rules_(std::move(rules)) {
  frames_.emplace_back();
  configs_.emplace_back();
  configs_[0].closed = true;
  configs_[0].next.fill(0);
  rows_.push_back(configs_[0].next.data());
  std::vector<Thread> kernel;
  bool returned = false;
  arrive({rules_->start, 0}, kernel, returned);
  start_ = config_of(std::move(kernel), returned);
}

bool GrammarMachine::pure_end(StateId state) const {
  const RuleState& rule = rules_->states[static_cast<size_t>(state)];
  return rule.ends && rule.count == 0;
}

// Returns are taken at once where nothing else can be done: the same sets come up more often so.
void GrammarMachine::arrive(Thread thread, std::vector<Thread>& kernel, bool& returned) const {
  while (pure_end(thread.state)) {
    if (thread.stack == 0) {
      returned = true;
      return;
    }
    const Frame& frame = frames_[static_cast<size_t>(thread.stack)];
    thread = {frame.back, frame.below};
  }
  kernel.push_back(thread);
}

ConfigId GrammarMachine::config_of(std::vector<Thread> kernel, bool returned) {
  if (kernel.empty() && !returned) return 0;
  std::ranges::sort(kernel);
  kernel.erase(std::ranges::unique(kernel).begin(), kernel.end());
  const auto [place, is_new] = ids_[returned].emplace(kernel, static_cast<ConfigId>(configs_.size()));
  if (!is_new) return place->second;
  weight_ += kernel.size();
  if (configs_.size() >= kMostConfigs || weight_ > kMostWeight)
    fail("grammar: too ambiguous; one token has too many readings");
  Config& config = configs_.emplace_back();
  config.kernel = std::move(kernel);
  config.returned = returned;
  config.next.fill(-1);
  rows_.push_back(config.next.data());
  return place->second;
}

StackId GrammarMachine::pushed(StateId back, StackId below) {
  const int32_t depth = frames_[static_cast<size_t>(below)].depth + 1;
  const auto [place, is_new] =
      frame_ids_.emplace(Frame{back, below, depth}, static_cast<StackId>(frames_.size()));
  if (is_new) frames_.push_back(place->first);
  return place->second;
}

// Calls within each other until what the edge leads to can end.
int32_t GrammarMachine::height_of(const RuleEdge& edge) const {
  const auto height = [&](StateId state) { return rules_->states[static_cast<size_t>(state)].height; };
  if (edge.kind != RuleEdge::Kind::kCall) return height(edge.target);
  return std::max(height(edge.target), height(edge.value) + 1);
}

bool GrammarMachine::too_deep(StackId stack, int32_t reach) const {
  return frames_[static_cast<size_t>(stack)].depth + reach > kDeepestCalls;
}

const GrammarMachine::Config& GrammarMachine::closed(ConfigId id) {
  Config& config = configs_[static_cast<size_t>(id)];
  if (!config.closed) close(config);
  return config;
}

// Follows empty edges, calls and returns to all bytes that can come.
void GrammarMachine::close(Config& config) {
  config.ends = config.returned;
  visited_.clear();
  todo_.clear();
  const auto visit = [&](const Thread& thread) {
    if (visited_.insert(key_of(thread)).second) todo_.push_back(thread);
    if (visited_.size() > kMostThreads) fail("grammar: too ambiguous; more than {} readings", kMostThreads);
  };
  for (const Thread& thread : config.kernel) visit(thread);
  while (!todo_.empty()) {
    const Thread thread = todo_.back();
    todo_.pop_back();
    const RuleState& state = rules_->states[static_cast<size_t>(thread.state)];
    if (state.ends) {
      const Frame frame = frames_[static_cast<size_t>(thread.stack)];
      if (thread.stack == 0) config.ends = true;
      if (thread.stack != 0) visit({frame.back, frame.below});
    }
    const int32_t depth = frames_[static_cast<size_t>(thread.stack)].depth;
    for (uint32_t i = 0; i < state.count; ++i) {
      const RuleEdge& edge = rules_->edges[state.first + i];
      const int32_t needed = depth + height_of(edge);
      config.reach = std::max(config.reach, needed);
      if (needed > kDeepestCalls) continue;  // a text that nests deeper cannot come
      const Thread to{edge.target, thread.stack};
      switch (edge.kind) {
        case RuleEdge::Kind::kByte:
          config.moves.push_back({edge.low, edge.high, edge.mark, to, depth - (edge.mark == Mark::kKeyEnd)});
          config.has_marks |= edge.mark != Mark::kNone;
          break;
        case RuleEdge::Kind::kEmpty:
          visit(to);
          break;
        case RuleEdge::Kind::kToken:
          config.token_moves.push_back({edge.value, to});
          break;
        case RuleEdge::Kind::kCall:
          // A call at the very end needs no way back.
          visit({edge.value, pure_end(edge.target) ? thread.stack : pushed(edge.target, thread.stack)});
          break;
      }
    }
  }
  for (const TokenMove& move : config.token_moves) config.tokens.push_back(move.id);
  weight_ += config.moves.size();
  config.closed = true;
}

ConfigId GrammarMachine::find_step(ConfigId id, uint8_t byte) {
  const Config& config = closed(id);
  work_ += config.moves.size();
  if (work_ > kMostWork) fail("grammar: too ambiguous; one token takes too long to find");
  std::vector<Thread> kernel;
  bool returned = false;
  for (const Move& move : config.moves)
    if (move.low <= byte && byte <= move.high) arrive(move.to, kernel, returned);
  const ConfigId to = config_of(std::move(kernel), returned);
  return rows_[static_cast<size_t>(id)][byte] = to;
}

ConfigId GrammarMachine::step_token(ConfigId id, TokenId token) {
  const Config& config = closed(id);
  std::vector<Thread> kernel;
  bool returned = false;
  for (const TokenMove& move : config.token_moves)
    if (move.id == token) arrive(move.to, kernel, returned);
  return config_of(std::move(kernel), returned);
}

void GrammarMachine::marks(ConfigId id, uint8_t byte, std::vector<MarkAt>& out) {
  out.clear();
  const Config& config = closed(id);
  if (!config.has_marks) return;
  for (const Move& move : config.moves)
    if (move.mark != Mark::kNone && move.low <= byte && byte <= move.high)
      out.push_back({move.mark, move.depth});
}

ConfigId GrammarMachine::local(std::span<const StateId> states, int32_t longest) {
  std::vector<Thread> kernel;
  for (StateId id : states) {
    const RuleState& state = rules_->states[static_cast<size_t>(id)];
    kernel.push_back({state.alike >= 0 && longest <= state.alike_for ? state.alike : id, 0});
  }
  return config_of(std::move(kernel), false);
}

ConfigId GrammarMachine::returned(StackId stack) {
  const Frame& frame = frames_[static_cast<size_t>(stack)];
  std::vector<Thread> kernel;
  bool returned = false;
  arrive({frame.back, frame.below}, kernel, returned);
  return config_of(std::move(kernel), returned);
}

ConfigId GrammarMachine::forget_but(ConfigId id) {
  const std::vector<Frame> old = std::move(frames_);
  const std::vector<Thread> kernel = std::move(configs_[static_cast<size_t>(id)].kernel);
  const bool returned = configs_[static_cast<size_t>(id)].returned;
  configs_.resize(1);
  rows_.resize(1);
  for (auto& ids : ids_) ids.clear();
  frame_ids_.clear();
  frames_.assign(1, Frame{});
  std::vector<Thread> moved;
  std::vector<StateId> backs;
  for (Thread thread : kernel) {
    backs.clear();
    for (StackId at = thread.stack; at != 0; at = old[static_cast<size_t>(at)].below)
      backs.push_back(old[static_cast<size_t>(at)].back);
    thread.stack = 0;
    while (!backs.empty()) {
      thread.stack = pushed(backs.back(), thread.stack);
      backs.pop_back();
    }
    moved.push_back(thread);
  }
  start_ = 0;  // gone
  weight_ = 0;
  return config_of(std::move(moved), returned);
}

}  // namespace kt::inline texts
