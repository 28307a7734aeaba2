#include "engine/calibration/expert_rounding.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/error.h"
#include "formats/floats.h"

namespace kt {
namespace {

// Rows that go through an expert together: adding their moments to H costs as much as multiplying 500 of them.
constexpr int64_t kRowsTogether = 2048;

}  // namespace

std::string_view name_of(RoundedBy by) {
  switch (by) {
    case RoundedBy::kGptq:
      return "gptq";
    case RoundedBy::kNoTokens:
      return "rtn: no tokens";
    case RoundedBy::kFewTokens:
      return "rtn: few tokens";
    case RoundedBy::kNotBetter:
      return "rtn: gptq was not better";
    case RoundedBy::kSingular:
      return "rtn: singular";
  }
  return "";
}

Format RunnableView::format_of(Format format) {
  if (format.code == Code::kI8 && format.span.n == 1 &&
      (format.scale == Scale::kBf16 || format.scale == Scale::kF16))
    format.scale = Scale::kF32;
  return format;
}

RunnableView::RunnableView(const Matrix& matrix) : view_(matrix.view()) {
  const Format format = format_of(matrix.format);
  if (format == matrix.format) return;
  const int64_t across = spans(format, matrix.k), length = format.span.k ? format.span.k : matrix.k;
  for (int64_t r = 0; r < matrix.n; ++r)
    for (int64_t s = 0; s < across; ++s) scales_.push_back(scale_at(matrix.view(), r, s * length));
  view_.format = format;
  view_.scales = reinterpret_cast<const uint8_t*>(scales_.data());
}

struct ExpertRounder::Mlp {
  Linear gate, up, down;
};

struct ExpertRounder::Original {
  std::unique_ptr<StoredMatrix> stored[3];
  std::vector<float> values[3];
  std::vector<float> bias[3];
};

ExpertRounder::ExpertRounder(std::shared_ptr<Pool> pool, const ExpertSource& source, const PackedSpec& spec,
                             const CalibrationDefaults& options)
    : pool_(std::move(pool)),
      source_(source),
      spec_(spec),
      options_(options),
      linears_(pool_),
      inter_pad_((source.inter() + 15) / 16 * 16) {
  const auto rows = static_cast<size_t>(kRowsTogether), hidden = static_cast<size_t>(source.hidden()),
             inter = static_cast<size_t>(source.inter()), pad = static_cast<size_t>(inter_pad_);
  options_.gptq.packed_rule = true;
  narrow_.resize(rows * hidden);
  for (auto* buffer : {&x_, &y_, &other_y_}) buffer->resize(rows * hidden);
  for (auto* buffer : {&gate_, &up_}) buffer->resize(rows * inter);
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
void ExpertRounder::for_chunks(const LayerInputs& inputs, std::span<const int32_t> rows, const Use& use) {
  for (size_t first = 0; first < rows.size(); first += kRowsTogether) {
    const size_t count = std::min<size_t>(kRowsTogether, rows.size() - first);
    inputs.inputs->gather(rows.subspan(first, count), narrow_.data());
    const size_t values = count * static_cast<size_t>(source_.hidden());
    for (size_t i = 0; i < values; ++i) x_[i] = to_f32(bf16{narrow_[i]});
    use(first, count);
  }
}

void ExpertRounder::middle(const Mlp& mlp, int rows, const Activation& activation) {
  const int64_t hidden = source_.hidden(), inter = source_.inter();
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
  kernels().activate({.gate_up = both_.data(),
                      .ld = 2 * inter_pad_,
                      .m = rows,
                      .pairs = static_cast<int>(inter_pad_ / 16),
                      .activation = activation,
                      .mid = mid_.data(),
                      .mid_ld = inter_pad_});
}

void ExpertRounder::output(const Mlp& mlp, int rows, float* y) {
  const LinearCall call{&mlp.down, mid_.data(), inter_pad_, y, source_.hidden()};
  linears_.run(rows, {&call, 1});
}

ExpertRounder::Mlp ExpertRounder::make_mlp(const Original& from, const Matrix& gate, const Matrix& up,
                                           const Matrix* down) const {
  const LinearOptions options{.precision = Precision::kBf16};
  const Pool& pool = *pool_;
  const RunnableView gate_view(gate), up_view(up);
  Mlp out{.gate = Linear(pool, gate_view.view(), from.bias[0], options, from.stored[0]->name),
          .up = Linear(pool, up_view.view(), from.bias[1], options, from.stored[1]->name),
          .down = {}};
  if (down) out.down = Linear(pool, RunnableView(*down).view(), from.bias[2], options, from.stored[2]->name);
  return out;
}

Hessian ExpertRounder::input_moments(const LayerInputs& inputs, const RoutedRows& train) {
  Hessian own(static_cast<int>(source_.hidden()));
  for_chunks(inputs, train.rows, [&](size_t, size_t count) {
    own.add({.x = narrow_.data(), .type = Real::kBf16, .rows = static_cast<int64_t>(count)}, &scratch_);
  });
  return shrunk(own, *inputs.prior, options_.shrinkage);
}

// Rows count by the square of their routing weight: that is how their errors enter the layer's output.
// Middles of other experts mean nothing here, so few rows are shrunk to their own diagonal.
Hessian ExpertRounder::middle_moments(const Mlp& mlp, const LayerInputs& inputs, const RoutedRows& train) {
  const auto dims = static_cast<int>(source_.inter());
  Hessian own(dims);
  std::vector<float> squared(train.weights.size());
  for (size_t i = 0; i < squared.size(); ++i) squared[i] = train.weights[i] * train.weights[i];
  for_chunks(inputs, train.rows, [&](size_t first, size_t count) {
    middle(mlp, static_cast<int>(count), inputs.activation);
    own.add({.x = mid_.data(),
             .type = Real::kF32,
             .stride = inter_pad_,
             .rows = static_cast<int64_t>(count),
             .weight = squared.data() + first},
            &scratch_);
  });
  return shrunk_to_diagonal(own, options_.shrinkage);
}

// False where no damping helps.
bool ExpertRounder::calibrate(const Original& from, const LayerInputs& inputs, const RoutedRows& train,
                              RoundedExpert& out) {
  const Format format = packed_format(spec_);
  const int64_t hidden = source_.hidden(), inter = source_.inter();
  // Moments that are not finite are as good as none.
  const auto factor_of = [&](const auto& moments) -> std::optional<GptqFactor> {
    try {
      return std::optional<GptqFactor>(GptqFactor(moments(), options_.gptq));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInput) throw;
      return std::nullopt;
    }
  };
  {
    const std::optional<GptqFactor> factor = factor_of([&] { return input_moments(inputs, train); });
    if (!factor) return false;
    out.figures.damping = factor->damping();
    out.gate = gptq(format, from.values[0], inter, hidden, *factor);
    out.up = gptq(format, from.values[1], inter, hidden, *factor);
  }
  const Mlp mlp = make_mlp(from, out.gate, out.up, nullptr);
  const std::optional<GptqFactor> factor = factor_of([&] { return middle_moments(mlp, inputs, train); });
  if (!factor) return false;
  out.figures.down_damping = factor->damping();
  out.down = gptq(format, from.values[2], hidden, inter, *factor);
  return true;
}

void ExpertRounder::judge(const Original& from, const LayerInputs& inputs, const RoutedRows& held_out,
                          const RoundedExpert& rtn, const RoundedExpert& other, ExpertFigures& figures) {
  const Matrix down = from.stored[2]->matrix();
  const Mlp reference = make_mlp(from, from.stored[0]->matrix(), from.stored[1]->matrix(), &down),
            nearest = make_mlp(from, rtn.gate, rtn.up, &rtn.down),
            calibrated = make_mlp(from, other.gate, other.up, &other.down);
  const auto width = static_cast<size_t>(source_.hidden());
  for_chunks(inputs, held_out.rows, [&](size_t first, size_t count) {
    const int rows = static_cast<int>(count);
    middle(reference, rows, inputs.activation);
    output(reference, rows, y_.data());
    const auto add = [&](const Mlp* mlp, double& total) {
      if (mlp) {
        middle(*mlp, rows, inputs.activation);
        output(*mlp, rows, other_y_.data());
      }
      for (size_t r = 0; r < count; ++r) {
        double sum = 0;
        for (size_t c = r * width; c < (r + 1) * width; ++c) {
          const double off = mlp ? double{other_y_[c]} - double{y_[c]} : double{y_[c]};
          sum += off * off;
        }
        const double weight = held_out.weights[first + r];
        total += weight * weight * sum;
      }
    };
    add(nullptr, figures.signal);
    add(&nearest, figures.rtn_error);
    add(&calibrated, figures.error);
  });
}

RoundedExpert ExpertRounder::round(int layer, int expert, const LayerInputs& inputs, const RoutedRows& train,
                                   const RoutedRows& held_out) {
  Original from;
  RoundedExpert rtn;
  Matrix* const into[] = {&rtn.gate, &rtn.up, &rtn.down};
  for (const Projection projection : kProjections) {
    const auto p = static_cast<size_t>(projection);
    from.stored[p] = source_.at(layer, expert, projection);
    const StoredMatrix& stored = *from.stored[p];
    from.values[p].resize(static_cast<size_t>(stored.n * stored.k));
    stored.values(0, stored.n, from.values[p].data());
    if (auto bias = source_.bias(layer, expert, projection)) from.bias[p] = std::move(*bias);
    *into[p] = round_packed(spec_, stored.n, stored.k, from.values[p].data(), stored.name);
  }
  RoundedExpert out;
  ExpertFigures& figures = out.figures;
  figures.tokens = static_cast<int64_t>(train.rows.size());
  figures.held_out = static_cast<int64_t>(held_out.rows.size());
  const auto to_nearest = [&](RoundedBy by) {
    figures.by = by;
    rtn.figures = figures;
    return std::move(rtn);
  };
  if (train.rows.empty()) return to_nearest(RoundedBy::kNoTokens);
  const bool few = figures.tokens < options_.floor || held_out.rows.empty();
  const bool done = !few && calibrate(from, inputs, train, out);
  judge(from, inputs, held_out, rtn, done ? out : rtn, figures);
  const bool trial = std::isfinite(figures.signal) && std::isfinite(figures.rtn_error);
  if (!trial) figures.signal = figures.rtn_error = figures.error = 0;
  if (few) return to_nearest(RoundedBy::kFewTokens);
  if (!done || !trial) return to_nearest(RoundedBy::kSingular);
  if (figures.error < figures.rtn_error) return out;
  figures.error = figures.rtn_error;
  return to_nearest(RoundedBy::kNotBetter);
}

}  // namespace kt
