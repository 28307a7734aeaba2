// Reads bytes by a grammar: a set of threads, each a state and a stack of calls, made deterministic as far as
// it is needed. A set of threads has a number, and so has every step from it, so walking the same way again
// is a table lookup. Bounded: too many threads or sets are an Error, never an explosion; and calls lie within each
// other only so far, in a way that leaves every thread the depth that its shortest end takes.
#pragma once
#include <array>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "text/grammar/rules.h"

namespace kt::inline texts {

using ConfigId = int32_t;  // a set of threads; 0: none, nothing fits
using StackId = int32_t;   // 0: empty

struct Thread {
  StateId state = 0;
  StackId stack = 0;
  auto operator<=>(const Thread&) const = default;
};

// A mark on a byte; `depth` tells objects that lie within each other apart.
struct MarkAt {
  Mark mark = Mark::kNone;
  int32_t depth = 0;
};

class GrammarMachine {
 public:
  explicit GrammarMachine(Grammar rules);

  ConfigId start() const { return start_; }
  ConfigId step(ConfigId config, uint8_t byte) {
    const int32_t known = rows_[static_cast<size_t>(config)][byte];
    return known >= 0 ? known : find_step(config, byte);
  }
  // Takes the edges that name the token; 0 if there are none.
  ConfigId step_token(ConfigId config, TokenId id);
  // Whether the grammar may end here.
  bool ends(ConfigId config) { return closed(config).ends; }
  // Whether any byte or token can follow.
  bool goes_on(ConfigId config) { return !closed(config).moves.empty() || !closed(config).tokens.empty(); }
  void marks(ConfigId config, uint8_t byte, std::vector<MarkAt>& out);
  std::span<const TokenId> tokens(ConfigId config) { return closed(config).tokens; }
  // The depth of calls that the next step may need, were there no limit; and whether a part of a set that was found
  // with an empty stack (local()) to need so much would be cut short on that one.
  int32_t reach(ConfigId config) { return closed(config).reach; }
  bool too_deep(StackId stack, int32_t reach) const;

  // What is left of a set before calls and empty edges are followed.
  std::span<const Thread> kernel(ConfigId config) const { return at(config).kernel; }
  // These states with empty stacks: what can happen before their network returns. It `ends` where it may
  // return. Longest: the bytes that will be read from it, at most (see RuleState::alike).
  ConfigId local(std::span<const StateId> states, int32_t longest);
  // After the network returned to that stack, which is not empty.
  ConfigId returned(StackId stack);

  // Forgets all sets but one, whose new number it returns.
  ConfigId forget_but(ConfigId config);
  size_t size() const { return configs_.size(); }
  size_t weight() const { return weight_; }  // what is kept, in threads
  // Work is counted from here: what reads on beyond the budget is an Error.
  void refill() { work_ = 0; }
  const GrammarRules& rules() const { return *rules_; }

 private:
  struct Frame {
    StateId back = 0;  // where the caller goes on
    StackId below = 0;
    int32_t depth = 0;
    auto operator<=>(const Frame&) const = default;
  };
  struct Move {
    uint8_t low = 0, high = 0;
    Mark mark = Mark::kNone;
    Thread to;
    int32_t depth = 0;
  };
  struct TokenMove {
    TokenId id = 0;
    Thread to;
  };
  struct Config {
    std::vector<Thread> kernel;  // sorted
    bool returned = false;       // a thread has nothing left to do
    bool closed = false, ends = false, has_marks = false;
    int32_t reach = 0;
    std::vector<Move> moves;
    std::vector<TokenMove> token_moves;
    std::vector<TokenId> tokens;
    std::array<int32_t, 256> next;  // by byte; -1: not known yet
  };
  struct Hash {
    size_t operator()(const std::vector<Thread>& threads) const;
    size_t operator()(const Frame& frame) const;
  };

  const Config& at(ConfigId config) const { return configs_[static_cast<size_t>(config)]; }
  ConfigId find_step(ConfigId config, uint8_t byte);
  const Config& closed(ConfigId config);
  void close(Config& config);
  bool pure_end(StateId state) const;
  int32_t height_of(const RuleEdge& edge) const;
  void arrive(Thread thread, std::vector<Thread>& kernel, bool& returned) const;
  ConfigId config_of(std::vector<Thread> kernel, bool returned);
  StackId pushed(StateId back, StackId below);

  Grammar rules_;
  std::deque<Config> configs_;
  std::vector<int32_t*> rows_;                                      // their `next`
  std::unordered_map<std::vector<Thread>, ConfigId, Hash> ids_[2];  // by `returned`
  std::vector<Frame> frames_;                                       // [0] is the empty stack
  std::unordered_map<Frame, StackId, Hash> frame_ids_;
  std::vector<Thread> todo_;              // of close()
  std::unordered_set<uint64_t> visited_;  // of close()
  ConfigId start_ = 0;
  size_t weight_ = 0, work_ = 0;
};

}  // namespace kt::inline texts
