// Grammars as networks of states over bytes: edges eat a byte, eat nothing, eat a token or call another
// network and come back. Calls make recursion, so that a machine with a stack (machine.h) reads them. This is
// the value and its builder; what JSON is, json_rules.h knows.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/grammar/grammar.h"

namespace kt::inline texts {

using StateId = int32_t;

// Places in a JSON text that a machine reports, for the rule that keys do not repeat. Objects and beginnings
// of keys are marked in the network of the object, the ends of keys in one that it calls.
enum class Mark : uint8_t { kNone, kObjectBegin, kKeyBegin, kKeyEnd };

struct RuleEdge {
  enum class Kind : uint8_t { kByte, kEmpty, kCall, kToken };
  Kind kind = Kind::kEmpty;
  uint8_t low = 0, high = 0;  // kByte: both inside
  Mark mark = Mark::kNone;    // kByte
  StateId target = 0;         // kCall: where to go on afterwards
  int32_t value = 0;          // kCall: the state where the callee begins; kToken: the id
};

struct RuleState {
  uint32_t first = 0, count = 0;  // edges
  bool ends = false;              // the network that was called may end here
  int32_t height = 0;             // calls within each other that the shortest way to an end takes
  // Whatever the next `alike_for` bytes are, they fare here as from `alike`. Long counted repetitions say so:
  // masks are found again by it.
  StateId alike = -1;
  int32_t alike_for = 0;
};

// From every state an end can be reached.
struct GrammarRules {
  std::vector<RuleState> states;
  std::vector<RuleEdge> edges;
  StateId start = 0;  // no edge calls it
  bool has_marks = false, has_tokens = false;
};

// A network under construction. Begins and ends may be joined freely; `fragment.end` has no edges yet.
struct RuleFragment {
  StateId begin = 0, end = 0;
};

class RuleBuilder {
 public:
  // Error(kInput) "grammar: more than ... states" past the budget: callers need not count.
  StateId state();
  void byte(StateId from, StateId to, uint8_t low, uint8_t high, Mark mark = Mark::kNone);
  void byte(StateId from, StateId to, char c, Mark mark = Mark::kNone) {
    byte(from, to, static_cast<uint8_t>(c), static_cast<uint8_t>(c), mark);
  }
  void empty(StateId from, StateId to);
  void call(StateId from, StateId to, StateId callee);
  void token(StateId from, StateId to, TokenId id);
  void ends(StateId state) { states_[static_cast<size_t>(state)].ends = true; }
  void alike(StateId state, StateId other, int32_t bytes);

  // Chains of states; each returns where it ends.
  StateId bytes(StateId from, std::string_view bytes);
  StateId after_call(StateId from, StateId callee);
  // Ways from `from` to `to` for each of the texts, common beginnings shared.
  void any_of(StateId from, StateId to, std::vector<std::string> texts);
  // A copy of another grammar.
  RuleFragment inlined(const GrammarRules& rules);

  size_t size() const { return states_.size(); }
  // Cuts what leads nowhere. nullptr: nothing fits.
  Grammar finish(StateId start) &&;

 private:
  struct Placed {
    StateId from = 0;
    RuleEdge edge;
  };
  void add(StateId from, const RuleEdge& edge);
  std::vector<int32_t> heights() const;

  std::vector<RuleState> states_;
  std::vector<Placed> edges_;
};

}  // namespace kt::inline texts
