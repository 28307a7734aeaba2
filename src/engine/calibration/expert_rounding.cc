#include "engine/calibration/expert_rounding.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "formats/floats.h"

namespace kt::inline engine {
struct ExpertRounder::Mlp {
  Linear gate, up, down;
};

ExpertRounder::ExpertRounder(std::shared_ptr<Pool> pool, int64_t hidden, int64_t inter,
                             const CalibrationDefaults& options)
    : pool_(std::move(pool)),
      hidden_(hidden),
      inter_(inter),
      options_(options),
      linears_(pool_),
      inter_pad_((inter + 15) / 16 * 16) {
  const auto rows = static_cast<size_t>(kRowsTogether), width = static_cast<size_t>(hidden),
             middle = static_cast<size_t>(inter), pad = static_cast<size_t>(inter_pad_);
  options_.gptq.packed_rule = true;
  narrow_.resize(rows * width);
  for (auto* buffer : {&x_, &y_, &other_y_}) buffer->resize(rows * width);
  for (auto* buffer : {&gate_, &up_}) buffer->resize(rows * middle);
  both_.resize(rows * 2 * pad);
  mid_.resize(rows * pad);
}

uint64_t ExpertRounder::bytes(int64_t hidden, int64_t inter) {
  const auto h = static_cast<uint64_t>(hidden), i = static_cast<uint64_t>(inter);
  // Values, codes of two ways of rounding, packings of three; moments and factors; rows on their way.
  return h * i * 3 * (4 + 2 + 6) + 3 * 4 * std::max(h * h, i * i) + 2 * 4 * i * i +
         kRowsTogether * (h * 14 + i * 24) + (uint64_t{24} << 20);
}

template <typename Use>
void ExpertRounder::for_chunks(const LayerInputs& inputs, const RoutedRows& rows, const Use& use) {
  const std::span<const int32_t> numbers = rows.rows;
  const auto width = static_cast<size_t>(hidden_);
  for (size_t first = 0; first < numbers.size(); first += kRowsTogether) {
    const size_t count = std::min<size_t>(kRowsTogether, numbers.size() - first);
    inputs.inputs->gather(numbers.subspan(first, count), narrow_.data());
    const size_t values = count * width;
    for (size_t i = 0; !rows.factors.empty() && i < values; ++i)
      narrow_[i] = to_bf16(to_f32(bf16{narrow_[i]}) * rows.factors[first + i / width]).bits;
    for (size_t i = 0; i < values; ++i) x_[i] = to_f32(bf16{narrow_[i]});
    use(first, count);
  }
}

void ExpertRounder::middle(const Mlp& mlp, int rows, const Activation& activation) {
  const int64_t hidden = hidden_, inter = inter_;
  const LinearCall calls[] = {{&mlp.gate, x_.data(), hidden, gate_.data(), inter},
                              {&mlp.up, x_.data(), hidden, up_.data(), inter}};
  linears_.run(rows, calls);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < inter; c += 16) {
      const int64_t count = std::min<int64_t>(16, inter - c);
      float* at = both_.data() + r * 2 * inter_pad_ + 2 * c;
      std::fill_n(at, 32, 0.0f);
      std::copy_n(gate_.data() + r * inter + c, count, at);
      std::copy_n(up_.data() + r * inter + c, count, at + 16);
    }
  best_kernels().activate({.gate_up = both_.data(),
                           .ld = 2 * inter_pad_,
                           .m = rows,
                           .pairs = static_cast<int>(inter_pad_ / 16),
                           .activation = activation,
                           .mid = mid_.data(),
                           .mid_ld = inter_pad_});
}

void ExpertRounder::output(const Mlp& mlp, int rows, float* y) {
  const LinearCall call{&mlp.down, mid_.data(), inter_pad_, y, hidden_};
  linears_.run(rows, {&call, 1});
}

ExpertRounder::Mlp ExpertRounder::make_mlp(const OriginalExpert& from, const RoundedExpert* rounded,
                                           Parts parts) const {
  const LinearOptions options{.precision = Precision::kBf16};
  const auto part = [&](size_t p) {
    const Pool& pool = *pool_;
    const std::string& name = from.stored[p]->name;
    if (rounded && rounded->matrices[p].n > 0)
      return Linear(pool, RunnableView(rounded->matrices[p]).view(), from.bias[p], options, name);
    const Matrix own = from.stored[p]->matrix();
    return Linear(pool, RunnableView(own).view(), from.bias[p], options, name);
  };
  return {.gate = part(0), .up = part(1), .down = parts == Parts::kAll ? part(2) : Linear()};
}

Hessian ExpertRounder::input_moments(const LayerInputs& inputs, const RoutedRows& train) {
  Hessian own(static_cast<int>(hidden_));
  for_chunks(inputs, train, [&](size_t, size_t count) {
    own.add(*pool_, {.x = narrow_.data(), .type = Real::kBf16, .rows = static_cast<int64_t>(count)},
            &scratch_);
  });
  // The prior is of rows as they are, one expert's may be weighed: as many rows of their mean size.
  double squares = 0;
  for (const float factor : train.factors) squares += double{factor} * factor;
  const double size = train.factors.empty() ? 1 : squares / static_cast<double>(train.factors.size());
  return shrunk(own, *inputs.prior, options_.shrinkage * size);
}

// Rows count by the square of their routing weight: that is how their errors enter the layer's output.
// Middles of other experts mean nothing here, so few rows are shrunk to their own diagonal.
Hessian ExpertRounder::middle_moments(const Mlp& mlp, const LayerInputs& inputs, const RoutedRows& train) {
  const auto dims = static_cast<int>(inter_);
  Hessian own(dims);
  std::vector<float> squared(train.weights.size());
  for (size_t i = 0; i < squared.size(); ++i) squared[i] = train.weights[i] * train.weights[i];
  for_chunks(inputs, train, [&](size_t first, size_t count) {
    middle(mlp, static_cast<int>(count), inputs.activation);
    own.add(*pool_,
            {.x = mid_.data(),
             .type = Real::kF32,
             .stride = inter_pad_,
             .rows = static_cast<int64_t>(count),
             .weight = squared.data() + first},
            &scratch_);
  });
  return shrunk_to_diagonal(own, options_.shrinkage);
}

// False where no damping helps.
bool ExpertRounder::calibrate(const OriginalExpert& from, const LayerInputs& inputs, const RoutedRows& train,
                              RoundedExpert& out) {
  const auto round_with = [&](const GptqFactor& factor, size_t p) {
    const StoredMatrix& stored = *from.stored[p];
    std::vector<float> values(static_cast<size_t>(stored.n * stored.k));
    stored.values(0, stored.n, values.data());
    out.matrices[p] = gptq(*pool_, packed_format(from.spec[p]), values, stored.n, stored.k, factor);
  };
  if (!from.keep[0] || !from.keep[1]) {
    const std::optional<GptqFactor> factor =
        factor_of([&] { return input_moments(inputs, train); }, options_.gptq);
    if (!factor) return false;
    out.figures.damping = factor->damping();
    for (const size_t p : {size_t{0}, size_t{1}})
      if (!from.keep[p]) round_with(*factor, p);
  }
  if (from.keep[2]) return true;
  const Mlp mlp = make_mlp(from, &out, Parts::kMiddle);
  const std::optional<GptqFactor> factor =
      factor_of([&] { return middle_moments(mlp, inputs, train); }, options_.gptq);
  if (!factor) return false;
  out.figures.down_damping = factor->damping();
  round_with(*factor, 2);
  return true;
}

void ExpertRounder::judge(const OriginalExpert& from, const LayerInputs& inputs, const RoutedRows& held_out,
                          const RoundedExpert& rtn, const RoundedExpert& other, ExpertFigures& figures) {
  const Mlp reference = make_mlp(from, nullptr, Parts::kAll), nearest = make_mlp(from, &rtn, Parts::kAll),
            calibrated = make_mlp(from, &other, Parts::kAll);
  const auto width = static_cast<size_t>(hidden_);
  for_chunks(inputs, held_out, [&](size_t first, size_t count) {
    const int rows = static_cast<int>(count);
    const float* const weights = held_out.weights.data() + first;
    middle(reference, rows, inputs.activation);
    output(reference, rows, y_.data());
    figures.signal += squared_error(y_.data(), nullptr, count, width, weights);
    const auto error = [&](const Mlp& mlp) {
      middle(mlp, rows, inputs.activation);
      output(mlp, rows, other_y_.data());
      return squared_error(y_.data(), other_y_.data(), count, width, weights);
    };
    figures.rtn_error += error(nearest);
    figures.error += error(calibrated);
  });
}

RoundedExpert ExpertRounder::round(const OriginalExpert& from, const LayerInputs& inputs,
                                   const RoutedRows& train, const RoutedRows& held_out) {
  RoundedExpert rtn, out;
  ExpertFigures& figures = out.figures;
  figures.tokens = static_cast<int64_t>(train.rows.size());
  figures.held_out = static_cast<int64_t>(held_out.rows.size());
  figures.by = RoundedBy::kKept;
  if (from.keep[0] && from.keep[1] && from.keep[2]) return out;
  std::vector<float> values;
  for (size_t p = 0; p < 3; ++p) {
    const StoredMatrix& stored = *from.stored[p];
    if (from.keep[p]) continue;
    values.resize(static_cast<size_t>(stored.n * stored.k));
    stored.values(0, stored.n, values.data());
    rtn.matrices[p] = round_packed(from.spec[p], stored.n, stored.k, values.data(), stored.name);
  }
  const bool done = !too_few(figures, options_) && calibrate(from, inputs, train, out);
  if (figures.tokens > 0) judge(from, inputs, held_out, rtn, done ? out : rtn, figures);
  if (decide(figures, options_, done)) return out;
  rtn.figures = figures;
  return rtn;
}

}  // namespace kt::inline engine
