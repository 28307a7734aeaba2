#include "bench/train_bench.h"

#include <algorithm>
#include <deque>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/text.h"
#include "formats/floats.h"
#include "nn/experts_grad.h"
#include "nn/experts_state.h"

namespace kt::inline bench {
namespace {

// In the order of a turn. A forward's backward is of another turn: in between, other layers pass.
enum Kind : size_t { kForward, kKeeping, kLora, kTraining, kBackward, kRecomputing };

// Sizes of the factors of one layer, in floats.
struct FactorSizes {
  FactorSizes(const ExpertsShape& s, int rank) {
    const size_t experts = static_cast<size_t>(s.experts) * static_cast<size_t>(rank);
    gate_up_a = experts * static_cast<size_t>(s.hidden);
    gate_up_b = experts * 2 * static_cast<size_t>(s.inter);
    down_a = experts * static_cast<size_t>(s.inter);
    down_b = experts * static_cast<size_t>(s.hidden);
  }
  size_t all() const { return gate_up_a + gate_up_b + down_a + down_b; }
  size_t gate_up_a = 0, gate_up_b = 0, down_a = 0, down_b = 0;
};

// Values and gradients of the factors of one layer. Values are as small as trained ones; B is not zero, as it is before
// the first step.
class Factors {
 public:
  Factors(const ExpertsShape& shape, int rank, uint64_t seed)
      : sizes_(shape, rank), rank_(rank), values_(sizes_.all()), grads_(sizes_.all()) {
    RandomBits random(seed);
    for (float& v : values_) v = 0.02f * (2 * static_cast<float>(random.uniform()) - 1);
  }
  ExpertLora lora() const {
    const float* const at = values_.data();
    const float* const down = at + sizes_.gate_up_a + sizes_.gate_up_b;
    return {.gate_up = {.rank = rank_, .scale = 2, .a = at, .b = at + sizes_.gate_up_a},
            .down = {.rank = rank_, .scale = 2, .a = down, .b = down + sizes_.down_a}};
  }
  ExpertLoraGrads grads() {
    float* const at = grads_.data();
    float* const down = at + sizes_.gate_up_a + sizes_.gate_up_b;
    return {
        .gate_up_a = at, .gate_up_b = at + sizes_.gate_up_a, .down_a = down, .down_b = down + sizes_.down_a};
  }

 private:
  FactorSizes sizes_;
  int rank_;
  std::vector<float> values_, grads_;
};

size_t floats_bytes(const FactorSizes& sizes) { return 2 * sizes.all() * sizeof(float); }

class TrainCalls {
 public:
  // Runs the forwards whose backwards are of the first turns, those that warm up.
  TrainCalls(const MoeModel& model, const TrainSetup& setup, int warmup);
  TrainCalls(const TrainCalls&) = delete;
  TrainCalls& operator=(const TrainCalls&) = delete;

  size_t kinds() const { return setup_.recompute ? kRecomputing + 1 : kBackward + 1; }
  std::vector<LimitCall> limits() const;
  void run(size_t index);
  void fill_in(TrainFigures& out) const;

 private:
  struct Record {
    SavedCall saved;
    size_t turn = 0;
  };

  size_t turns() const { return calls_.size(); }
  // Each kind is as many layers behind the last one as the kinds leave between them.
  int layer_of(size_t turn, size_t kind) const {
    const size_t layers = static_cast<size_t>(model_.layers());
    return static_cast<int>((turn + layers * kinds() - kind * stride_ % layers) % layers);
  }
  // The turn whose forward is followed by the backward of this one: the same layer.
  size_t forward_of(size_t turn) const { return (turn + turns() - stride_) % turns(); }
  ForwardArgs args(size_t turn);
  void forward(size_t turn, Kind kind);
  void backward(size_t turn, size_t forward_turn, int layer, const SavedCall* saved);
  Factors& factors(int layer) { return factors_[static_cast<size_t>(layer) % factors_.size()]; }
  void check_memory(size_t sets) const;

  const MoeModel& model_;
  TrainSetup setup_;
  ExpertsShape shape_;
  size_t stride_;
  std::vector<MoeCall> calls_;  // of each turn; their layers are not asked
  std::deque<Factors> factors_;
  std::deque<Record> records_;  // oldest first
  SavedCall unused_;
  size_t kept_bytes_ = 0;
  std::vector<bf16> input_, output_, output_grad_;
  std::vector<float> weights_, input_grad_, weights_grad_;
};

TrainCalls::TrainCalls(const MoeModel& model, const TrainSetup& setup, int warmup)
    : model_(model),
      setup_(setup),
      shape_(model.setup().shape),
      stride_(std::max<size_t>(1, static_cast<size_t>(model.layers()) / kinds())),
      calls_(deal_calls(shape_, model.setup().top_k, model.layers(), setup.tokens, setup.routing)) {
  const size_t rows = static_cast<size_t>(setup.tokens) * static_cast<size_t>(shape_.hidden);
  const size_t pairs = static_cast<size_t>(setup.tokens) * static_cast<size_t>(model.setup().top_k);
  const size_t each = floats_bytes(FactorSizes(shape_, setup.rank)),
               layers = static_cast<size_t>(model.layers());
  const size_t sets = std::clamp<size_t>(ceil_div(2 * cpu().l3, each) + 1, 1, layers);
  check_memory(sets);
  for (size_t i = 0; i < sets; ++i) factors_.emplace_back(shape_, setup.rank, i);
  RandomBits random(5);
  input_.resize(rows);
  output_.resize(rows);
  output_grad_.resize(rows);
  input_grad_.resize(rows);
  weights_.assign(pairs, 1.0f / static_cast<float>(model.setup().top_k));
  weights_grad_.resize(pairs);
  for (bf16& x : input_) x = to_bf16(random_activation(random));
  for (bf16& x : output_grad_) x = to_bf16(1e-3f * random_activation(random));
  const size_t first = turns() - static_cast<size_t>(std::max(warmup, 1)) % turns();
  for (size_t behind = stride_; behind > 0; --behind)
    forward((first + turns() - behind) % turns(), kTraining);
}

void TrainCalls::check_memory(size_t sets) const {
  const ExpertsGrad grad(model_.layer(0));
  const int top_k = model_.setup().top_k;
  const double kept =
      static_cast<double>(grad.kept_bytes(setup_.tokens, top_k)) * static_cast<double>(stride_ + 3);
  const double lora =
      static_cast<double>(floats_bytes(FactorSizes(shape_, setup_.rank))) * static_cast<double>(sets);
  const double rows = 10.0 * setup_.tokens * shape_.hidden;
  const double workspace = static_cast<double>(model_.layer(0).forward_bytes(setup_.tokens, top_k) +
                                               grad.backward_bytes(setup_.tokens, top_k, {}));
  check_available(kept + lora + rows + workspace,
                  text("factors of rank {} and kept rows of {} tokens", setup_.rank, setup_.tokens),
                  "try fewer `tokens`, `experts` or `layers`, or a smaller `rank`");
}

std::vector<LimitCall> TrainCalls::limits() const {
  const double operations = 6.0 * shape_.hidden * shape_.inter * setup_.tokens * model_.setup().top_k;
  const double stored = model_.layer(0).stored_bytes_per_expert();
  std::vector<LimitCall> out;
  for (size_t turn = 0; turn < turns(); ++turn)
    for (size_t kind = 0; kind < kinds(); ++kind) {
      const MoeCall& call = calls_[kind == kBackward ? forward_of(turn) : turn];
      out.push_back({stored * call.experts_hit, operations});
    }
  return out;
}

ForwardArgs TrainCalls::args(size_t turn) {
  return {.tokens = setup_.tokens,
          .top_k = model_.setup().top_k,
          .input = input_.data(),
          .input_type = Real::kBf16,
          .ids = calls_[turn].ids.data(),
          .weights = weights_.data(),
          .output = output_.data(),
          .output_type = Real::kBf16};
}

void TrainCalls::forward(size_t turn, Kind kind) {
  const int layer = layer_of(turn, kind);
  TrainForwardArgs call{.call = args(turn)};
  if (kind == kLora || kind == kTraining) call.lora = factors(layer).lora();
  if (kind == kKeeping) call.keep = &unused_;
  if (kind == kTraining) call.keep = &records_.emplace_back(Record{.turn = turn}).saved;
  ExpertsGrad(model_.layer(layer)).forward(call);
  if (call.keep) kept_bytes_ = call.keep->bytes();
}

void TrainCalls::backward(size_t turn, size_t forward_turn, int layer, const SavedCall* saved) {
  KT_CHECK(!saved || layer == layer_of(forward_turn, kTraining), "turn {}: backward of layer {}", turn,
           layer);
  ExpertsGrad(model_.layer(layer))
      .backward({.call = args(forward_turn),
                 .lora = factors(layer).lora(),
                 .saved = saved,
                 .output_grad = output_grad_.data(),
                 .output_grad_type = Real::kBf16,
                 .input_grad = input_grad_.data(),
                 .weights_grad = weights_grad_.data(),
                 .lora_grads = factors(layer).grads()});
}

void TrainCalls::run(size_t index) {
  const size_t turn = index / kinds();
  const Kind kind = static_cast<Kind>(index % kinds());
  if (kind < kBackward) return forward(turn, kind);
  if (kind == kRecomputing) return backward(turn, turn, layer_of(turn, kind), nullptr);
  const Record record = std::move(records_.front());
  records_.pop_front();
  KT_CHECK(record.turn == forward_of(turn), "turn {}: the oldest forward is of turn {}", turn, record.turn);
  backward(turn, record.turn, layer_of(turn, kind), &record.saved);
}

void TrainCalls::fill_in(TrainFigures& out) const {
  const Experts& layer = model_.layer(0);
  const ExpertsGrad grad(layer);
  const int tokens = setup_.tokens, top_k = model_.setup().top_k;
  const ExpertLora lora = factors_.front().lora();
  const LoraAdapter adapter(layer, lora, layer.options().precision != Precision::kF32);
  out.lora_bytes = floats_bytes(FactorSizes(shape_, setup_.rank));
  out.kept_bytes = kept_bytes_;
  out.workspace_bytes = layer.state().workspace->bytes();
  out.planned_bytes = layer.forward_bytes(tokens, top_k, &adapter) + grad.backward_bytes(tokens, top_k, lora);
  out.resident_bytes = static_cast<size_t>(own_memory());
  out.rotating_bytes = out.lora_bytes * factors_.size() + kept_bytes_ * (records_.size() + 1);
}

}  // namespace

Product training_product(const Kernels& kernels, Precision precision) {
  return precision != Precision::kF32 && has_product(kernels, Product::kBf16) ? Product::kBf16
                                                                              : Product::kF32;
}

void check_factors(const ExpertsShape& shape, int rank) {
  const double widths = 2.0 * shape.hidden + 3.0 * shape.inter;
  check_available(2 * sizeof(float) * widths * shape.experts * rank,
                  text("factors of rank {} for {} experts, and their gradients,", rank, shape.experts),
                  "try a smaller `rank` or fewer `experts`");
}

TrainFigures measure_training(const MoeModel& model, Reader& reader, const TrainSetup& setup,
                              const MeasureFor& time) {
  const MoeSetup& of = model.setup();
  TrainCalls calls(model, setup, time.warmup);
  const std::vector<LimitCall> limits = calls.limits();
  std::vector<LimitFigures> kinds = measure_in_turns({.pool = of.pool,
                                                      .kernels = of.kernels,
                                                      .product = training_product(*of.kernels, of.precision),
                                                      .reader = &reader,
                                                      .calls = limits,
                                                      .time = time},
                                                     calls.kinds(), [&](size_t i) { calls.run(i); });
  TrainFigures out;
  const double stored = model.layer(0).stored_bytes_per_expert();
  out.experts_hit = kinds[kForward].bytes / stored;
  out.forward = std::move(kinds[kForward]);
  out.keeping = std::move(kinds[kKeeping]);
  out.lora = std::move(kinds[kLora]);
  out.training = std::move(kinds[kTraining]);
  out.backward = std::move(kinds[kBackward]);
  if (setup.recompute) out.recomputing = std::move(kinds[kRecomputing]);
  calls.fill_in(out);
  return out;
}

}  // namespace kt::inline bench
