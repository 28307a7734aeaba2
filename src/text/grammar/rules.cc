#include "text/grammar/rules.h"

#include <algorithm>

#include "base/error.h"

namespace kt::inline texts {
namespace {

constexpr size_t kMostStates = 300'000, kMostEdges = 1'200'000;

}  // namespace

StateId RuleBuilder::state() {
  if (states_.size() >= kMostStates) fail("grammar: too large; expected at most {} states", kMostStates);
  states_.emplace_back();
  return static_cast<StateId>(states_.size() - 1);
}

void RuleBuilder::add(StateId from, const RuleEdge& edge) {
  if (edges_.size() >= kMostEdges) fail("grammar: too large; expected at most {} edges", kMostEdges);
  edges_.push_back({from, edge});
}

void RuleBuilder::byte(StateId from, StateId to, uint8_t low, uint8_t high, Mark mark) {
  add(from, {.kind = RuleEdge::Kind::kByte, .low = low, .high = high, .mark = mark, .target = to});
}

void RuleBuilder::empty(StateId from, StateId to) { add(from, {.target = to}); }

void RuleBuilder::call(StateId from, StateId to, StateId callee) {
  add(from, {.kind = RuleEdge::Kind::kCall, .target = to, .value = callee});
}

void RuleBuilder::token(StateId from, StateId to, TokenId id) {
  add(from, {.kind = RuleEdge::Kind::kToken, .target = to, .value = id});
}

void RuleBuilder::alike(StateId state, StateId other, int32_t bytes) {
  states_[static_cast<size_t>(state)].alike = other;
  states_[static_cast<size_t>(state)].alike_for = bytes;
}

StateId RuleBuilder::bytes(StateId from, std::string_view bytes) {
  for (char c : bytes) {
    const StateId next = state();
    byte(from, next, c);
    from = next;
  }
  return from;
}

StateId RuleBuilder::after_call(StateId from, StateId callee) {
  const StateId next = state();
  call(from, next, callee);
  return next;
}

void RuleBuilder::any_of(StateId from, StateId to, std::vector<std::string> texts) {
  std::ranges::sort(texts);
  std::vector<StateId> path{from};  // the states of the last text
  std::string_view last;
  for (const std::string& text : texts) {
    const auto shared = std::ranges::mismatch(text, last).in1 - text.begin();
    if (shared == std::ssize(text) && shared == std::ssize(last) && path.size() > 1) continue;
    path.resize(static_cast<size_t>(shared) + 1);
    for (size_t i = static_cast<size_t>(shared); i < text.size(); ++i) {
      path.push_back(state());
      byte(path[i], path[i + 1], text[i]);
    }
    empty(path.back(), to);
    last = text;
  }
}

RuleFragment RuleBuilder::inlined(const GrammarRules& rules) {
  const auto offset = static_cast<StateId>(states_.size());
  const StateId end = offset + static_cast<StateId>(rules.states.size());
  for (const RuleState& old : rules.states) {
    RuleState& copy = states_[static_cast<size_t>(state())];
    copy.ends = old.ends;
    copy.alike = old.alike < 0 ? -1 : old.alike + offset;
    copy.alike_for = old.alike_for;
  }
  state();  // end
  for (size_t from = 0; from < rules.states.size(); ++from)
    for (uint32_t i = 0; i < rules.states[from].count; ++i) {
      RuleEdge edge = rules.edges[rules.states[from].first + i];
      edge.target += offset;
      if (edge.kind == RuleEdge::Kind::kCall) edge.value += offset;
      add(offset + static_cast<StateId>(from), edge);
    }
  // The outermost network no longer returns but goes on at `end`.
  std::vector<char> seen(rules.states.size());
  std::vector<StateId> todo{rules.start};
  seen[static_cast<size_t>(rules.start)] = 1;
  while (!todo.empty()) {
    const auto from = static_cast<size_t>(todo.back());
    todo.pop_back();
    const RuleState& old = rules.states[from];
    if (old.ends) {
      states_[static_cast<size_t>(offset) + from].ends = false;
      empty(offset + static_cast<StateId>(from), end);
    }
    for (uint32_t i = 0; i < old.count; ++i) {
      const auto target = static_cast<size_t>(rules.edges[old.first + i].target);
      if (!seen[target]) todo.push_back(static_cast<StateId>(target));
      seen[target] = 1;
    }
  }
  return {rules.start + offset, end};
}

// Of each state; -1 where no end can be reached. An edge needs what its target needs, and a call one more than its
// callee: so states are known in the order of their heights, as in a search for shortest ways.
std::vector<int32_t> RuleBuilder::heights() const {
  std::vector<std::vector<uint32_t>> users(states_.size());  // edges that come or call here
  for (size_t i = 0; i < edges_.size(); ++i) {
    users[static_cast<size_t>(edges_[i].edge.target)].push_back(static_cast<uint32_t>(i));
    if (edges_[i].edge.kind == RuleEdge::Kind::kCall)
      users[static_cast<size_t>(edges_[i].edge.value)].push_back(static_cast<uint32_t>(i));
  }
  std::vector<int32_t> found(states_.size(), -1);
  std::vector<std::vector<size_t>> of_height(1);  // candidates
  for (size_t i = 0; i < states_.size(); ++i)
    if (states_[i].ends) of_height[0].push_back(i);
  for (size_t height = 0; height < of_height.size(); ++height)
    while (!of_height[height].empty()) {
      const size_t state = of_height[height].back();
      of_height[height].pop_back();
      if (found[state] >= 0) continue;
      found[state] = static_cast<int32_t>(height);
      for (uint32_t i : users[state]) {
        const RuleEdge& edge = edges_[i].edge;
        const int32_t after = found[static_cast<size_t>(edge.target)];
        const bool calls = edge.kind == RuleEdge::Kind::kCall;
        const int32_t inside = calls ? found[static_cast<size_t>(edge.value)] : 0;
        if (after < 0 || inside < 0) continue;
        const auto needs = static_cast<size_t>(std::max(after, inside + (calls ? 1 : 0)));
        if (of_height.size() <= needs) of_height.resize(needs + 1);
        of_height[needs].push_back(static_cast<size_t>(edges_[i].from));
      }
    }
  return found;
}

Grammar RuleBuilder::finish(StateId start) && {
  const std::vector<int32_t> height = heights();
  const auto dead = [&](StateId state) { return height[static_cast<size_t>(state)] < 0; };
  if (dead(start)) return nullptr;
  std::erase_if(edges_, [&](const Placed& placed) {
    const RuleEdge& edge = placed.edge;
    return dead(placed.from) || dead(edge.target) || (edge.kind == RuleEdge::Kind::kCall && dead(edge.value));
  });
  std::ranges::stable_sort(edges_, {}, &Placed::from);
  auto rules = std::make_shared<GrammarRules>();
  rules->start = start;
  rules->states = std::move(states_);
  for (size_t i = 0; i < height.size(); ++i) rules->states[i].height = height[i];
  rules->edges.reserve(edges_.size());
  for (const auto& [from, edge] : edges_) {
    RuleState& state = rules->states[static_cast<size_t>(from)];
    if (state.count++ == 0) state.first = static_cast<uint32_t>(rules->edges.size());
    rules->has_marks |= edge.mark != Mark::kNone;
    rules->has_tokens |= edge.kind == RuleEdge::Kind::kToken;
    rules->edges.push_back(edge);
  }
  return rules;
}

}  // namespace kt::inline texts
