// What training through a layer of experts computes by its definition: in double precision, one number at a time, on
// dequantised weights.
#pragma once
#include <algorithm>

#include "nn/experts_grad.h"
#include "nn/testing/reference_layer.h"

namespace kt::inline nn {

using Doubles = std::vector<double>;

// Random factors of all experts.
struct RandomLora {
  ExpertsShape shape;
  int rank;
  std::vector<float> a1, b1, a2, b2;
  static constexpr float kScale1 = 0.75f, kScale2 = 1.5f;

  RandomLora(const ExpertsShape& s, int r, unsigned seed) : shape(s), rank(r) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 1);
    const auto fill = [&](std::vector<float>& v, int rows, int columns, int in) {
      for (int64_t i = 0; i < int64_t{s.experts} * rows * columns; ++i)
        v.push_back(normal(random) / std::sqrt(static_cast<float>(in)));
    };
    fill(a1, r, s.hidden, s.hidden);
    fill(b1, 2 * s.inter, r, r);
    fill(a2, r, s.inter, s.inter);
    fill(b2, s.hidden, r, r);
  }
  ExpertLora view() const {
    if (rank == 0) return {};
    return {.gate_up = {rank, kScale1, a1.data(), b1.data()}, .down = {rank, kScale2, a2.data(), b2.data()}};
  }
};

// Everything that a gradient is taken of. The same shape holds gradients and directions.
struct Point {
  Doubles input, weights, a1, b1, a2, b2;
  std::array<Doubles*, 6> all() { return {&input, &weights, &a1, &b1, &a2, &b2}; }
};

// Norms of gradients that are made of few sums over columns, which may happen to cancel, if these sums were as large as
// such sums usually are: |x| |y| / sqrt(columns). Errors are relative to these then.
struct UsualSizes {
  double weights = 0, a1 = 0, b1 = 0, a2 = 0, b2 = 0;
};

struct ReferenceGrads {
  Doubles output;
  Point grads;
  UsualSizes sizes;
};

class ReferenceLayer {
 public:
  ReferenceLayer(const Layer& layer, const Batch& batch, const RandomLora& lora, const Activation& f,
                 const uint8_t* skip = nullptr)
      : layer_(layer), batch_(batch), rank_(lora.rank), f_(f), skip_(skip) {
    const auto wide = [](const std::vector<float>& v) { return Doubles(v.begin(), v.end()); };
    const auto values = [&](const std::vector<Matrix>& matrices, std::vector<Doubles>& out) {
      for (const Matrix& m : matrices) {
        std::vector<float> v(static_cast<size_t>(m.n * m.k));
        dequantise(m.view(), v);
        out.push_back(wide(v));
      }
    };
    values(layer.gate, gate_);
    values(layer.up, up_);
    values(layer.down, down_);
    at = {wide(batch.input), wide(batch.weights), wide(lora.a1), wide(lora.b1), wide(lora.a2), wide(lora.b2)};
  }

  Point at;

  double loss(const Point& p, const std::vector<float>& dout) const {
    const Doubles out = run(p, nullptr, nullptr).output;
    double sum = 0;
    for (size_t i = 0; i < out.size(); ++i) sum += out[i] * dout[i];
    return sum;
  }
  ReferenceGrads grads(const std::vector<float>& dout) const {
    Point zeros = at;
    for (Doubles* v : zeros.all()) std::fill(v->begin(), v->end(), 0.0);
    return run(at, &dout, &zeros);
  }

 private:
  struct Row {
    int e, token, pair;
    Doubles t, g, u, h, td;
  };

  double b1(const Point& p, int e, int half, int i, int r) const {
    return p.b1[((size_t(e) * 2 + half) * layer_.shape.inter + i) * rank_ + r];
  }

  Row forward_row(const Point& p, int pair, int e, Doubles& out) const {
    const auto [experts, hidden, inter] = layer_.shape;
    Row row{e,
            pair / batch_.top_k,
            pair,
            Doubles(rank_),
            Doubles(inter),
            Doubles(inter),
            Doubles(inter),
            Doubles(rank_)};
    const double* x = p.input.data() + size_t(row.token) * hidden;
    for (int r = 0; r < rank_; ++r)
      for (int h = 0; h < hidden; ++h) row.t[r] += p.a1[(size_t(e) * rank_ + r) * hidden + h] * x[h];
    for (int i = 0; i < inter; ++i) {
      double g = layer_.gate_bias.empty() ? 0 : layer_.gate_bias[e][i];
      double u = layer_.up_bias.empty() ? 0 : layer_.up_bias[e][i];
      for (int h = 0; h < hidden; ++h) {
        g += gate_[e][size_t(i) * hidden + h] * x[h];
        u += up_[e][size_t(i) * hidden + h] * x[h];
      }
      for (int r = 0; r < rank_; ++r) {
        g += RandomLora::kScale1 * row.t[r] * b1(p, e, 0, i, r);
        u += RandomLora::kScale1 * row.t[r] * b1(p, e, 1, i, r);
      }
      row.g[i] = g;
      row.u[i] = u;
      row.h[i] = activation(g, u, f_);
    }
    for (int r = 0; r < rank_; ++r)
      for (int i = 0; i < inter; ++i) row.td[r] += p.a2[(size_t(e) * rank_ + r) * inter + i] * row.h[i];
    for (int h = 0; h < hidden; ++h) {
      double y = layer_.down_bias.empty() ? 0 : layer_.down_bias[e][h];
      for (int i = 0; i < inter; ++i) y += down_[e][size_t(h) * inter + i] * row.h[i];
      for (int r = 0; r < rank_; ++r)
        y += RandomLora::kScale2 * row.td[r] * p.b2[(size_t(e) * hidden + h) * rank_ + r];
      out[size_t(row.token) * hidden + h] += p.weights[pair] * y;
    }
    return row;
  }

  // Derivatives of the activation; at a clamp the inner one, as torch has it.
  void slopes(double g, double u, double& dg, double& du) const {
    const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
    if (f_.kind == ActivationKind::kGeluErf) {
      const double below = 0.5 * (1 + std::erf(g / std::sqrt(2.0)));
      dg = (below + g * std::exp(-g * g / 2) / std::sqrt(2 * M_PI)) * u;
      du = g * below;
    } else if (f_.kind == ActivationKind::kRelu) {
      dg = g > 0 ? u : 0;
      du = std::max(g, 0.0);
    } else if (f_.kind == ActivationKind::kGeluTanh) {
      const double c = std::sqrt(2 / M_PI), th = std::tanh(c * (g + 0.044715 * g * g * g));
      dg = (0.5 * (1 + th) + 0.5 * g * (1 - th * th) * c * (1 + 3 * 0.044715 * g * g)) * u;
      du = 0.5 * g * (1 + th);
    } else {
      const double l = f_.limit > 0 ? f_.limit : INFINITY, a = f_.alpha > 0 ? f_.alpha : 1;
      const double gc = std::min(g, l), uc = std::clamp(u, -l, l), s = sigmoid(a * gc);
      const double factor = f_.alpha > 0 ? uc + 1 : uc;
      dg = g > l ? 0 : s * (1 + a * gc * (1 - s)) * factor;
      du = u > l || u < -l ? 0 : gc * s;
    }
  }

  void backward_row(const Point& p, const Row& row, const float* dout, Point& d, UsualSizes& squares) const {
    const auto [experts, hidden, inter] = layer_.shape;
    const int e = row.e;
    const double w = p.weights[row.pair];
    Doubles q(rank_), dhu(inter), dt(rank_);
    for (int r = 0; r < rank_; ++r)
      for (int h = 0; h < hidden; ++h)
        q[r] += RandomLora::kScale2 * dout[h] * p.b2[(size_t(e) * hidden + h) * rank_ + r];
    double dw = 0, dz2 = 0;
    for (int h = 0; h < hidden; ++h)
      dw += layer_.down_bias.empty() ? 0 : double{dout[h]} * layer_.down_bias[e][h];
    for (int i = 0; i < inter; ++i) {
      for (int h = 0; h < hidden; ++h) dhu[i] += dout[h] * down_[e][size_t(h) * inter + i];
      for (int r = 0; r < rank_; ++r) dhu[i] += q[r] * p.a2[(size_t(e) * rank_ + r) * inter + i];
      dw += dhu[i] * row.h[i];
    }
    d.weights[row.pair] = dw;
    for (int r = 0; r < rank_; ++r) {
      for (int i = 0; i < inter; ++i) d.a2[(size_t(e) * rank_ + r) * inter + i] += w * q[r] * row.h[i];
      for (int h = 0; h < hidden; ++h)
        d.b2[(size_t(e) * hidden + h) * rank_ + r] += RandomLora::kScale2 * w * dout[h] * row.td[r];
    }
    double* dx = d.input.data() + size_t(row.token) * hidden;
    const double* x = p.input.data() + size_t(row.token) * hidden;
    for (int i = 0; i < inter; ++i) {
      double slope[2];
      slopes(row.g[i], row.u[i], slope[0], slope[1]);
      for (int half = 0; half < 2; ++half) {
        const double dz = w * dhu[i] * slope[half];
        dz2 += dz * dz;
        const Doubles& weights = half ? up_[e] : gate_[e];
        for (int h = 0; h < hidden; ++h) dx[h] += dz * weights[size_t(i) * hidden + h];
        for (int r = 0; r < rank_; ++r) {
          d.b1[((size_t(e) * 2 + half) * inter + i) * rank_ + r] += RandomLora::kScale1 * dz * row.t[r];
          dt[r] += RandomLora::kScale1 * dz * b1(p, e, half, i, r);
        }
      }
    }
    for (int r = 0; r < rank_; ++r)
      for (int h = 0; h < hidden; ++h) {
        dx[h] += dt[r] * p.a1[(size_t(e) * rank_ + r) * hidden + h];
        d.a1[(size_t(e) * rank_ + r) * hidden + h] += dt[r] * x[h];
      }
    add_squares(p, row, dout, dhu, dz2, squares);
  }

  static double square(const double* x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
    return sum;
  }

  void add_squares(const Point& p, const Row& row, const float* dout, const Doubles& dhu, double dz2,
                   UsualSizes& sizes) const {
    const auto [experts, hidden, inter] = layer_.shape;
    const double w2 = p.weights[row.pair] * p.weights[row.pair], h2 = square(row.h.data(), inter),
                 x2 = square(p.input.data() + size_t(row.token) * hidden, hidden);
    const Doubles wide(dout, dout + hidden);
    const double d2 = square(wide.data(), hidden), s1 = RandomLora::kScale1 * RandomLora::kScale1,
                 s2 = RandomLora::kScale2 * RandomLora::kScale2;
    const auto factor = [&](const Doubles& of, int64_t rows) {  // the square of one expert's, all ranks
      return square(of.data() + row.e * rows * rank_, rows * rank_);
    };
    sizes.weights += square(dhu.data(), inter) * h2 / inter;
    sizes.a1 += s1 * dz2 * factor(p.b1, 2 * inter) / (2 * inter) * x2;
    sizes.b1 += s1 * x2 * factor(p.a1, hidden) / hidden * dz2;
    sizes.a2 += s2 * w2 * d2 * factor(p.b2, hidden) / hidden * h2;
    sizes.b2 += s2 * w2 * h2 * factor(p.a2, inter) / inter * d2;
  }

  ReferenceGrads run(const Point& p, const std::vector<float>* dout, Point* d) const {
    ReferenceGrads out;
    out.output.resize(batch_.input.size());
    for (int pair = 0; pair < batch_.tokens * batch_.top_k; ++pair) {
      const int e = batch_.ids[pair];
      if (e < 0 || e >= layer_.shape.experts || (skip_ && skip_[e])) continue;
      const Row row = forward_row(p, pair, e, out.output);
      if (d) backward_row(p, row, dout->data() + size_t(row.token) * layer_.shape.hidden, *d, out.sizes);
    }
    if (d) out.grads = *d;
    for (double* size : {&out.sizes.weights, &out.sizes.a1, &out.sizes.b1, &out.sizes.a2, &out.sizes.b2})
      *size = std::sqrt(*size);
    return out;
  }

  const Layer& layer_;
  const Batch& batch_;
  int rank_;
  Activation f_;
  const uint8_t* skip_;
  std::vector<Doubles> gate_, up_, down_;
};

// Gradients as a layer of ours gives them. Those of factors start at `before`.
struct Grads {
  std::vector<float> output, input, weights, a1, b1, a2, b2;
  bool operator==(const Grads&) const = default;
};

struct TrainCall {
  const Experts& experts;
  const Batch& batch;
  const RandomLora& lora;
  const std::vector<float>& dout;
  const uint8_t* skip = nullptr;
  bool keep = true;
  float before = 0;

  Grads run() const {
    Grads g;
    const ExpertsShape& s = experts.shape();
    g.output.assign(static_cast<size_t>(batch.tokens) * s.hidden, std::nanf(""));
    g.input = g.output;
    g.weights.assign(batch.weights.size(), std::nanf(""));
    for (auto [to, from] :
         {std::pair{&g.a1, &lora.a1}, {&g.b1, &lora.b1}, {&g.a2, &lora.a2}, {&g.b2, &lora.b2}})
      to->assign(from->size(), before);
    const ExpertsGrad grad(experts);
    ForwardArgs call = batch.args(g.output.data());
    call.skip = skip;
    SavedCall saved;
    grad.forward({.call = call, .lora = lora.view(), .keep = keep ? &saved : nullptr});
    call.output = nullptr;
    grad.backward({.call = call,
                   .lora = lora.view(),
                   .saved = &saved,
                   .output_grad = dout.data(),
                   .input_grad = g.input.data(),
                   .weights_grad = g.weights.data(),
                   .lora_grads = {g.a1.data(), g.b1.data(), g.a2.data(), g.b2.data()}});
    return g;
  }
};

inline std::vector<float> random_grad(const Batch& batch, const ExpertsShape& shape, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.01f);
  std::vector<float> out(static_cast<size_t>(batch.tokens) * shape.hidden);
  for (float& x : out) x = to_f32(to_bf16(normal(random)));
  return out;
}

}  // namespace kt::inline nn
