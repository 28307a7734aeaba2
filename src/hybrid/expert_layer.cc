// Forwards of one layer on the calling thread or the team's: checks, the mask, what is deferred.
#include "hybrid/expert_layer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "formats/floats.h"
#include "hybrid/expert_layer_state.h"

namespace kt::inline hybrid {
namespace {

constexpr int kTokensOfItem = 4;     // of the addition of carries
constexpr size_t kCarriesKept = 16;  // models that one thread runs in turn

// What a forward at once deferred, for the next layer of the same model in the same thread.
struct ThreadCarry {
  uint64_t model = 0;
  int layer = 0, tokens = 0;
  std::vector<float> sums;  // [tokens, hidden]; empty: taken
};

thread_local std::vector<ThreadCarry> thread_carries;

ThreadCarry* find_carry(uint64_t model) {
  for (ThreadCarry& carry : thread_carries)
    if (carry.model == model) return &carry;
  return nullptr;
}

ThreadCarry& carry_of(uint64_t model) {
  if (ThreadCarry* found = find_carry(model)) return *found;
  if (thread_carries.size() >= kCarriesKept) thread_carries.erase(thread_carries.begin());
  return thread_carries.emplace_back(ThreadCarry{.model = model, .sums = {}});
}

// What this forward has to add; whatever was deferred is taken or dropped.
std::vector<float> take_carry(uint64_t model, int layer, int tokens) {
  if (thread_carries.empty()) return {};
  ThreadCarry* const carry = find_carry(model);
  if (!carry || carry->sums.empty()) return {};
  std::vector<float> sums = std::exchange(carry->sums, {});
  if (carry->layer < layer && carry->tokens == tokens) return sums;
  warn_of_dropped(carry->layer);
  return {};
}

int64_t id_at(const LayerCall& call, int64_t i) {
  return call.ids_are_64_bit ? static_cast<const int64_t*>(call.ids)[i]
                             : static_cast<const int32_t*>(call.ids)[i];
}

// What the output holds, added to what was deferred (nothing: zeros).
void add_output(const void* output, Real type, size_t count, std::vector<float>& carry) {
  carry.resize(count);
  const auto* const from = static_cast<const std::byte*>(output);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = 0;  // little end first
    std::memcpy(&bits, from + i * size_of_real(type), size_of_real(type));
    carry[i] += type == Real::kF32    ? std::bit_cast<float>(bits)
                : type == Real::kBf16 ? to_f32(bf16{static_cast<uint16_t>(bits)})
                                      : to_f32(f16{static_cast<uint16_t>(bits)});
  }
}

void check_options(const ExpertLayerOptions& o) {
  const std::string name = text("layer {}", o.layer);
  if (o.layer < 0) fail("{}: expected a number of at least 0", name);
  if (o.shape.experts < 1 || o.shape.hidden < 1 || o.shape.inter < 1)
    fail("{}: expected positive sizes, got {} experts, hidden {}, inter {}", name, o.shape.experts,
         o.shape.hidden, o.shape.inter);
  if (o.top_k < 1) fail("{}: {} experts per token, expected at least 1", name, o.top_k);
  if (o.max_tokens < 1) fail("{}: at most {} tokens, expected at least 1", name, o.max_tokens);
  if (o.max_deferred < 0 || o.max_deferred > o.top_k)
    fail("{}: {} deferred experts per token, expected 0 to {}", name, o.max_deferred, o.top_k);
}

}  // namespace

ForwardArgs forward_args(const LayerCall& call, void* output, Real output_type) {
  return {.tokens = call.tokens,
          .top_k = call.top_k,
          .input = call.input,
          .input_type = call.input_type,
          .input_stride = call.input_stride,
          .ids = call.ids_are_64_bit ? nullptr : static_cast<const int32_t*>(call.ids),
          .ids64 = call.ids_are_64_bit ? static_cast<const int64_t*>(call.ids) : nullptr,
          .weights = call.weights,
          .output = output,
          .output_type = output_type};
}

size_t size_of_real(Real type) { return type == Real::kF32 ? 4 : 2; }

void ExpertLayer::State::check_call(const LayerCall& call) const {
  {
    const std::shared_lock lock(in_use);
    if (!experts) fail("layer {}: no weights are loaded", options.layer);
  }
  if (call.tokens < 0 || call.tokens > options.max_tokens)
    fail("layer {}: {} tokens, expected at most {}", options.layer, call.tokens, options.max_tokens);
  if (call.top_k < 1) fail("layer {}: {} experts per token, expected at least 1", options.layer, call.top_k);
  if (call.tokens == 0) return;
  if (!call.input || !call.ids || !call.weights)
    fail("layer {}: a null address for {}", options.layer,
         !call.input ? "the input"
         : !call.ids ? "the ids"
                     : "the weights");
}

// A copy, because a forward looks at it twice and the caller may write in between.
const uint8_t* ExpertLayer::State::read_mask(std::vector<uint8_t>& bytes) {
  const std::lock_guard lock(mask_mutex);
  if (!mask) return nullptr;
  bytes.resize(static_cast<size_t>(options.shape.experts));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = __atomic_load_n(mask + i, __ATOMIC_RELAXED);
  return bytes.data();
}

// Pairs that nobody computes here may hold anything: engines leave them so where they pad a batch.
void ExpertLayer::State::check_weights(const LayerCall& call, const uint8_t* skip) const {
  const int64_t pairs = int64_t{call.tokens} * call.top_k;
  for (int64_t i = 0; i < pairs; ++i) {
    if (!std::isnan(call.weights[i])) [[likely]]
      continue;
    const int64_t id = id_at(call, i);
    if (id < 0 || id >= options.shape.experts || (skip && skip[id])) continue;
    fail("layer {}: the weight of token {}, slot {} (expert {}) is NaN", options.layer, i / call.top_k,
         i % call.top_k, id);
  }
}

void ExpertLayer::State::split(const LayerCall& call, const uint8_t* skip, DeferredPairs& pairs) const {
  const size_t count = static_cast<size_t>(call.tokens) * static_cast<size_t>(call.top_k);
  thread_local std::vector<int64_t> ids;
  ids.resize(count);
  for (size_t i = 0; i < count; ++i) ids[i] = id_at(call, static_cast<int64_t>(i));
  pairs.now.resize(count);
  pairs.later.resize(count);
  split_deferred(ids, {call.weights, count}, call.top_k, options.max_deferred, options.shape.experts,
                 pairs.now, pairs.later);
  if (!skip) return;
  // The mask holds for the whole forward: what it says later is for later forwards.
  for (int64_t& id : pairs.later)
    if (id >= 0 && skip[id]) id = -1;
}

// In f32, rounded once.
void ExpertLayer::State::forward_adding(ForwardArgs args, const float* carry) const {
  const int hidden = options.shape.hidden;
  thread_local std::vector<float> sums;
  sums.resize(static_cast<size_t>(args.tokens) * static_cast<size_t>(hidden));
  void* const output = std::exchange(args.output, sums.data());
  const Real type = std::exchange(args.output_type, Real::kF32);
  experts->forward(args);
  const Kernels& kernels = experts->kernels();
  float* const from = sums.data();
  const auto add = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernels.add_scaled(from + t * hidden, carry + t * hidden, 1.0f, hidden);
      kernels.store(static_cast<std::byte*>(output) + t * hidden * static_cast<int64_t>(size_of_real(type)),
                    type, from + t * hidden, hidden);
    }
  };
  if (args.tokens <= kTokensOfItem) return add(0, args.tokens);
  run_items(*team->pool(), (args.tokens + kTokensOfItem - 1) / kTokensOfItem, [&](int64_t i) {
    add(i * kTokensOfItem, std::min<int64_t>(args.tokens, (i + 1) * kTokensOfItem));
  });
}

void ExpertLayer::State::run(const LayerCall& call, void* output, const float* carry, DeferredPairs* pairs) {
  thread_local std::vector<uint8_t> mask_bytes;
  const uint8_t* const skip = read_mask(mask_bytes);
  check_weights(call, skip);
  ForwardArgs args = forward_args(call, output, call.input_type);
  args.skip = skip;
  if (pairs) {
    split(call, skip, *pairs);
    args.ids = nullptr;
    args.ids64 = pairs->now.data();
  }
  const std::shared_lock lock(in_use);
  if (carry)
    forward_adding(args, carry);
  else
    experts->forward(args);
}

void ExpertLayer::State::run_deferred(const LayerCall& call, const DeferredPairs& pairs, float* sums) const {
  ForwardArgs args = forward_args(call, sums, Real::kF32);
  args.ids = nullptr;
  args.ids64 = pairs.later.data();
  const std::shared_lock lock(in_use);
  experts->forward(args);
}

void ExpertLayer::State::Failure::keep(std::exception_ptr what) noexcept {
  const std::lock_guard lock(mutex);
  if (first) return;
  first = std::move(what);
  any.store(true, std::memory_order_release);
}

void ExpertLayer::State::Failure::rethrow() {
  if (!any.load(std::memory_order_acquire)) return;
  std::exception_ptr kept;
  {
    const std::lock_guard lock(mutex);
    any.store(false, std::memory_order_relaxed);
    kept = std::exchange(first, nullptr);
  }
  if (kept) std::rethrow_exception(kept);
}

ExpertLayer::State::State(std::shared_ptr<CpuTeam> with, ExpertLayerOptions how)
    : team(std::move(with)),
      options(std::move(how)),
      method(&weight_method_named(options.method)),
      model_slot(options.model, options.weights, options.shape.hidden, options.layer) {}

ExpertLayer::ExpertLayer(std::shared_ptr<CpuTeam> team, ExpertLayerOptions options) {
  if (!team) fail("layer {}: a team is needed", options.layer);
  check_options(options);
  state_ = std::make_shared<State>(std::move(team), std::move(options));
}

void ExpertLayer::set_mask(const uint8_t* mask) {
  state_->team->check_process();
  const std::lock_guard lock(state_->mask_mutex);
  state_->mask = mask;
}

void ExpertLayer::forward(const LayerCall& call, void* output) {
  State& s = *state_;
  s.team->check_process();
  s.check_call(call);
  s.forwards.rethrow();
  if (call.tokens == 0) return;
  if (!output) fail("layer {}: a null address for the output", s.options.layer);
  std::vector<float> carry = take_carry(s.model_slot.model(), s.options.layer, call.tokens);
  const size_t count = static_cast<size_t>(call.tokens) * static_cast<size_t>(s.options.shape.hidden);
  if (call.adds) add_output(output, call.input_type, count, carry);
  const float* const add = carry.empty() ? nullptr : carry.data();
  if (s.options.max_deferred == 0) return s.run(call, output, add, nullptr);
  thread_local DeferredPairs pairs;
  s.run(call, output, add, &pairs);
  std::vector<float> sums(count);
  s.run_deferred(call, pairs, sums.data());
  ThreadCarry& next = carry_of(s.model_slot.model());
  next.layer = s.options.layer;
  next.tokens = call.tokens;
  next.sums = std::move(sums);
}

void ExpertLayer::check() {
  state_->team->check_process();
  state_->forwards.rethrow();
}

bool ExpertLayer::loaded() const {
  state_->team->check_process();
  const std::shared_lock lock(state_->in_use);
  return state_->experts.has_value();
}

const ExpertLayerOptions& ExpertLayer::options() const { return state_->options; }

const Experts& ExpertLayer::experts() const {
  if (!state_->experts) fail("layer {}: no weights are loaded", state_->options.layer);
  return *state_->experts;
}

CpuTeam& ExpertLayer::team() const { return *state_->team; }

}  // namespace kt::inline hybrid
