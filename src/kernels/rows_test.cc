// The row kernels of every table: packing activations, the activation function, sums and conversions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <numeric>

#include "kernels/testing/activations.h"
#include "kernels/testing/guarded.h"
#include "kernels/testing/tables.h"

namespace kt::inline kernels {
namespace {

constexpr Real kReals[] = {Real::kF32, Real::kBf16, Real::kF16};
size_t size_of(Real type) { return type == Real::kF32 ? 4 : 2; }

void put(Real type, std::byte* at, float x) {
  if (type == Real::kF32) {
    std::memcpy(at, &x, 4);
  } else {
    const uint16_t bits = type == Real::kBf16 ? to_bf16(x).bits : to_f16(x).bits;
    std::memcpy(at, &bits, 2);
  }
}
float rounded_to(Real type, float x) {
  return type == Real::kF32 ? x : type == Real::kBf16 ? to_f32(to_bf16(x)) : to_f32(to_f16(x));
}

// The orders a table asks for: that of `few` and that of `many`.
std::vector<ActShape> orders(const Kernels& t) {
  return {ActShape{.side = t.few_side, .step_bytes = t.few_step_bytes},
          ActShape{.side = t.many_side, .step_bytes = t.many_step_bytes}};
}

struct PackCase {
  ActShape shape;
  Real type;
  int m, k;
  const int32_t* index;
};

// Source rows end where the page does: a read past the last column faults.
void check_pack(const Kernels& t, const PackCase& c, const std::vector<float>& rows, int source_rows) {
  const int64_t stride = c.k;
  Guarded source(static_cast<size_t>(source_rows) * stride * size_of(c.type), size_of(c.type)),
      memory(act_bytes(c.shape));
  std::vector<float> wanted(static_cast<size_t>(c.m) * c.k);
  for (int64_t i = 0; i < source_rows * stride; ++i) put(c.type, source.as() + i * size_of(c.type), rows[i]);
  for (int i = 0; i < c.m; ++i)
    for (int k = 0; k < c.k; ++k)
      wanted[i * c.k + k] = rounded_to(c.type, rows[(c.index ? c.index[i] : i) * stride + k]);
  const Acts acts = acts_in(c.shape, memory.as());
  t.pack_acts({.source = source.as(),
               .type = c.type,
               .stride = stride,
               .index = c.index,
               .m = c.m,
               .k = c.k,
               .out = acts});
  ASSERT_TRUE(memory.intact() && source.intact());
  const int unit = std::lcm(kChunk, std::lcm(c.shape.scale_span, c.shape.sum_span));
  if (!c.shape.far && c.shape.k_pad > unit) {  // a few columns at a time, from the last on: the same bytes
    Guarded again(act_bytes(c.shape));
    for (int at = (c.shape.k_pad - 1) / unit * unit; at >= 0; at -= unit)
      t.pack_acts({.source = source.as(),
                   .type = c.type,
                   .stride = stride,
                   .index = c.index,
                   .m = c.m,
                   .k = c.k,
                   .first = at,
                   .last = std::min(c.shape.k_pad, at + unit),
                   .out = acts_in(c.shape, again.as())});
    ASSERT_TRUE(again.intact());
    ASSERT_EQ(std::memcmp(again.as(), memory.as(), act_bytes(c.shape)), 0);
  }
  const PlainActs plain = plain_acts(c.shape, wanted, c.m, c.k);
  for (int i = 0; i < c.shape.rows; ++i) {
    for (int k = 0; k < c.shape.k_pad; ++k) {
      const float want = plain.codes[static_cast<size_t>(i) * c.shape.k_pad + k];
      ASSERT_EQ(packed_act(t, acts, i, k), want) << "row " << i << ", column " << k;
    }
    if (c.shape.code != ActCode::kS8) continue;
    for (int s = 0; s < c.shape.scale_spans(); ++s)
      ASSERT_EQ(std::bit_cast<uint32_t>(
                    acts.scales[c.shape.scale_at(i, c.shape.scale_spans()) + s * c.shape.scale_step(i)]),
                std::bit_cast<uint32_t>(plain.scales[i * c.shape.scale_spans() + s]))
          << "row " << i << ", scale " << s;
    for (int s = 0; s < c.shape.sum_spans(); ++s) {
      const int at = i * c.shape.sum_spans() + s;
      const int64_t there = c.shape.scale_at(i, c.shape.sum_spans()) + s * c.shape.scale_step(i);
      if (c.shape.sums == SumKind::kCodes)
        ASSERT_EQ(acts.sums[there], plain.sums[at]) << "row " << i << ", sum " << s;
      else
        ASSERT_EQ(acts.values[there], plain.values[at]) << "row " << i << ", sum " << s;
    }
  }
}

TEST(PackActs, ByDefinition) {
  struct Spans {
    int scale, sum;
  };
  const int32_t index[] = {6, 0, 3, 3, 5};
  for (const Kernels* t : tables_under_test())
    for (const ActCode code : {ActCode::kS8, ActCode::kBf16, ActCode::kF32})
      for (const Real type : kReals)
        for (const int k : {1, 15, 16, 17, 64, 100, 130, 777, 1100}) {
          const int k_pad = (k + 63) / 64 * 64;
          for (const Spans spans : {Spans{k_pad, k_pad}, Spans{16, 16}, Spans{16, 64}, Spans{32, 16},
                                    Spans{128, 128}, Spans{512, 512}})
            for (const int32_t* gather : {static_cast<const int32_t*>(nullptr), index}) {
              if (code != ActCode::kS8 && spans.scale != k_pad) continue;
              SCOPED_TRACE(testing::Message() << t->name << " code " << static_cast<int>(code) << " from "
                                              << static_cast<int>(type) << ", k " << k << ", spans "
                                              << spans.scale << " " << spans.sum);
              for (const ActShape& order : orders(*t)) {
                const ActShape shape{.code = code,
                                     .rows = 16,
                                     .k_pad = k_pad,
                                     .side = order.side,
                                     .step_bytes = order.step_bytes,
                                     .scale_span = spans.scale,
                                     .sum_span = spans.sum};
                check_pack(*t, {shape, type, 5, k, gather}, random_rows(7, k, static_cast<uint32_t>(k)), 7);
                ActShape changed = shape;
                changed.sum_factor = -8, changed.beside = true;
                if (12 % order.side == 0) changed.rows = 12;  // a last group of four
                check_pack(*t, {changed, type, 5, k, gather}, random_rows(7, k, static_cast<uint32_t>(k)), 7);
                changed.sums = SumKind::kValues, changed.sum_factor = 1;
                if (code == ActCode::kS8)
                  check_pack(*t, {changed, type, 5, k, gather}, random_rows(7, k, static_cast<uint32_t>(k)),
                             7);
                if (code != ActCode::kS8 || spans.scale != k_pad || !t->many_s8[0]) continue;
                ActShape far = shape;
                far.far = true;
                check_pack(*t, {far, type, 5, k, gather}, random_rows(7, k, static_cast<uint32_t>(k)), 7);
              }
              if (HasFatalFailure()) return;
            }
        }
}

// Rows of zeros have scale 0; the smallest and largest numbers stay finite; halves round to even.
TEST(PackActs, SpecialRows) {
  constexpr int kK = 64;
  std::vector<float> rows(8 * kK);
  for (int c = 0; c < kK; ++c) {
    rows[1 * kK + c] = 1e-42f;
    rows[2 * kK + c] = c % 2 ? 3e38f : -3e38f;
    rows[3 * kK + c] = 1e-30f * static_cast<float>(c);
    rows[4 * kK + c] = c == 0 ? 127.0f : static_cast<float>(c) / 2;  // halves
    rows[5 * kK + c] = -0.0f;
    rows[6 * kK + c] = 1e30f * static_cast<float>(c - 30);
    rows[7 * kK + c] = c == 63 ? -1e-36f : 0;
  }
  for (const Kernels* t : tables_under_test())
    for (const int span : {32, 64}) {
      SCOPED_TRACE(t->name);
      for (const ActShape& order : orders(*t)) {
        const ActShape shape{.code = ActCode::kS8,
                             .rows = 16,
                             .k_pad = kK,
                             .side = order.side,
                             .step_bytes = order.step_bytes,
                             .scale_span = span,
                             .sum_span = span};
        check_pack(*t, {shape, Real::kF32, 8, kK, nullptr}, rows, 8);
        if (span != kK || !t->many_s8[0]) continue;
        ActShape far = shape;
        far.far = true;
        check_pack(*t, {far, Real::kF32, 8, kK, nullptr}, rows, 8);
        far.by_row = true;
        far.sum_span = 32;
        check_pack(*t, {far, Real::kF32, 8, kK, nullptr}, rows, 8);
      }
    }
}

// Rows packed one by one and copied to where they stand side by side are what packing them there gives.
void check_far_copies(bool by_row) {
  constexpr int kK = 1100, kRows = 32, kM = 19;
  const std::vector<float> rows = random_rows(kRows, kK, 5);
  int32_t index[kM];
  for (int i = 0; i < kM; ++i) index[i] = (i * 7 + 3) % kRows;
  for (const Kernels* t : tables_under_test()) {
    if (!t->many_s8[0]) continue;
    const ActShape there{.code = ActCode::kS8,
                         .rows = kRows,
                         .k_pad = 1152,
                         .side = t->many_side,
                         .step_bytes = t->many_step_bytes,
                         .scale_span = 1152,
                         .sum_span = by_row ? 640 : 1152,
                         .far = true,
                         .by_row = by_row};
    ActShape one = there;
    one.side = 1;
    Guarded plain(act_bytes(one)), copied(act_bytes(there)), direct(act_bytes(there));
    const Acts from = acts_in(one, plain.as()), to = acts_in(there, copied.as()),
               want = acts_in(there, direct.as());
    t->pack_acts({.source = rows.data(), .type = Real::kF32, .stride = kK, .m = kRows, .k = kK, .out = from});
    t->copy_acts({.from = from, .index = index, .m = kM, .out = to});
    t->pack_acts({.source = rows.data(),
                  .type = Real::kF32,
                  .stride = kK,
                  .index = index,
                  .m = kM,
                  .k = kK,
                  .out = want});
    ASSERT_TRUE(plain.intact() && copied.intact() && direct.intact());
    for (int i = 0; i < kRows; ++i) {
      EXPECT_EQ(to.scales[i], want.scales[i]);
      for (int j = 0; j < one.sum_spans(); ++j)
        EXPECT_EQ(to.sums[i * one.sum_spans() + j], want.sums[i * one.sum_spans() + j]);
      for (int k = 0; k < one.k_pad; ++k)
        ASSERT_EQ(packed_act(*t, to, i, k), packed_act(*t, want, i, k))
            << t->name << " row " << i << " column " << k;
    }
  }
}

TEST(CopyActs, FarCodes) { check_far_copies(false); }
TEST(CopyActs, FarCodesByRow) { check_far_copies(true); }

// Numbers that are not finite, and rows of nothing else, write no more than they may.
TEST(PackActs, NotFinite) {
  constexpr int kK = 256;
  std::vector<float> rows(16 * kK, std::numeric_limits<float>::quiet_NaN());
  for (int i = 1; i < 16; ++i)
    for (int c = 0; c < kK; ++c)
      rows[i * kK + c] = c % i ? static_cast<float>(c) : std::numeric_limits<float>::infinity();
  for (const Kernels* t : tables_under_test())
    for (const int lists : {0, 1, 2}) {  // none, by chunk, by row
      const bool far = lists > 0;
      if (far && !t->many_s8[0]) continue;
      const ActShape shape{.code = ActCode::kS8,
                           .rows = 16,
                           .k_pad = kK,
                           .side = t->many_side,
                           .step_bytes = t->many_step_bytes,
                           .scale_span = kK,
                           .sum_span = kK,
                           .far = far,
                           .by_row = lists == 2};
      Guarded memory(act_bytes(shape));
      t->pack_acts({.source = rows.data(),
                    .type = Real::kF32,
                    .stride = kK,
                    .m = 16,
                    .k = kK,
                    .out = acts_in(shape, memory.as())});
      EXPECT_TRUE(memory.intact()) << t->name;
    }
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double activated(double gate, double up, const Activation& f) {
  if (f.kind == ActivationKind::kSwiGlu) {
    if (f.limit > 0) {
      gate = std::min<double>(gate, f.limit);
      up = std::clamp<double>(up, -f.limit, f.limit);
    }
    return f.alpha > 0 ? gate * sigmoid(static_cast<double>(f.alpha) * gate) * (up + 1)
                       : gate * sigmoid(gate) * up;
  }
  if (f.kind == ActivationKind::kRelu) return std::max<double>(gate, 0) * up;
  if (f.kind == ActivationKind::kGeluTanh)  // (1 + tanh z) / 2 is sigmoid(2 z), which does not cancel
    return gate * sigmoid(2 * std::sqrt(2 / std::numbers::pi) * (gate + 0.044715 * gate * gate * gate)) * up;
  return 0.5 * gate * std::erfc(-gate / std::numbers::sqrt2) * up;
}

// Allowed: 2^-20 of the result (a dozen roundings, exp within 2e-7), and where the exact function dies out below zero:
//   swiglu     1e-37 |gate up|   exp stops at 87, so sigmoid is at least 1.6e-38
//   gelu_tanh  |z| 2^-22         z's relative error 2^-22 is multiplied by |z| <= 87 in exp, relative, only where z < 0
//   gelu_erf   2^-22 |gate up|   1 + erf(x) cancels, absolute 2^-23 each
double allowed(double gate, double up, double result, const Activation& f) {
  if (f.kind == ActivationKind::kSwiGlu && f.alpha > 0) up = std::fabs(up) + 1;
  const double size = std::fabs(gate * up), base = std::fabs(result) * 0x1p-20;
  if (f.kind == ActivationKind::kRelu) return base + 1e-44;
  if (f.kind == ActivationKind::kGeluErf) return base + 0x1p-22 * size + 1e-44;
  const double slope = f.kind == ActivationKind::kGeluTanh
                           ? 1.6 * std::fabs(gate + 0.044715 * gate * gate * gate)
                           : std::fabs(gate) * std::max(1.0f, f.alpha);
  return base + std::fabs(result) * std::min(slope, 90.0) * 0x1p-22 + 1e-37 * size + 1e-44;
}

TEST(Activate, AgainstDouble) {
  constexpr int kPairs = 3, kM = 40;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const float marks[] = {0,  -0.0f, 1e-30f, -1e-30f, 1,  -1,  7,   -7,   10,   -10,
                         50, -50,   86,     -86,     88, -88, 100, -100, 1e4f, -1e4f};
  Guarded gate_up(kM * kPairs * 32 * 4), bias(2 * kPairs * 16 * 4), mid(kM * kPairs * 16 * 4);
  for (int i = 0; i < kM * kPairs * 32; ++i)
    gate_up.as<float>()[i] = random() % 3 ? 3 * normal(random) : marks[random() % std::size(marks)];
  for (int i = 0; i < 2 * kPairs * 16; ++i) bias.as<float>()[i] = normal(random);
  const Activation kinds[] = {{ActivationKind::kSwiGlu, 0, 0},      {ActivationKind::kSwiGlu, 7, 0},
                              {ActivationKind::kSwiGlu, 7, 1.702f}, {ActivationKind::kSwiGlu, 0, 1.702f},
                              {ActivationKind::kGeluTanh, 0, 0},    {ActivationKind::kGeluErf, 0, 0},
                              {ActivationKind::kRelu, 0, 0}};
  for (const Kernels* t : tables_under_test())
    for (const Activation& f : kinds)
      for (const bool biased : {false, true}) {
        const float* gate_bias = biased ? bias.as<float>() : nullptr;
        const float* up_bias = biased ? bias.as<float>() + kPairs * 16 : nullptr;
        std::fill_n(mid.as<float>(), kM * kPairs * 16, std::numeric_limits<float>::quiet_NaN());
        t->activate({.gate_up = gate_up.as<float>(),
                     .ld = kPairs * 32,
                     .m = kM,
                     .pairs = kPairs,
                     .gate_bias = gate_bias,
                     .up_bias = up_bias,
                     .activation = f,
                     .mid = mid.as<float>(),
                     .mid_ld = kPairs * 16});
        ASSERT_TRUE(mid.intact());
        for (int i = 0; i < kM; ++i)
          for (int c = 0; c < kPairs * 16; ++c) {
            const float* from = gate_up.as<float>() + i * kPairs * 32 + c / 16 * 32 + c % 16;
            const float gate = from[0] + (biased ? gate_bias[c] : 0),
                        up = from[16] + (biased ? up_bias[c] : 0);
            const double want = activated(gate, up, f), have = mid.as<float>()[i * kPairs * 16 + c];
            ASSERT_LE(std::fabs(have - want), allowed(gate, up, want, f))
                << t->name << " kind " << static_cast<int>(f.kind) << ", gate " << gate << ", up " << up
                << ": " << have << " for " << want;
          }
      }
}

TEST(AddScaled, RoundsOnce) {
  for (const Kernels* t : tables_under_test())
    for (const int n : {0, 1, 3, 4, 7, 15, 16, 17, 33, 100}) {
      const std::vector<float> x = random_rows(1, n, 1), y = random_rows(1, n, 2);
      Guarded sum(n * 4, 4), from(n * 4, 4);
      std::copy(y.begin(), y.end(), sum.as<float>());
      std::copy(x.begin(), x.end(), from.as<float>());
      t->add_scaled(sum.as<float>(), from.as<float>(), 0.3f, n);
      ASSERT_TRUE(sum.intact());
      for (int i = 0; i < n; ++i)
        ASSERT_EQ(sum.as<float>()[i], std::fma(x[i], 0.3f, y[i])) << t->name << " " << i << " of " << n;
    }
}

// The same bits as formats/floats.h, NaN as any NaN.
TEST(Store, RoundsHalfToEven) {
  std::vector<float> numbers = {0,
                                -0.0f,
                                1,
                                -1,
                                65504,
                                65519,
                                65520,
                                1e30f,
                                -1e30f,
                                6e-8f,
                                3e-8f,
                                2.98023223877e-8f,
                                1e-40f,
                                6.1e-5f,
                                6.09e-5f,
                                1.00048828125f,
                                1.00146484375f,
                                1.00390625f,
                                1.01171875f,
                                3.4028235e38f,
                                std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN(),
                                std::bit_cast<float>(0x7f800001u)};
  std::mt19937 random(5);
  while (numbers.size() < 5000) numbers.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  while (numbers.size() < 10000)
    numbers.push_back(to_f32(f16{static_cast<uint16_t>(random() & 0x7bff)}) *
                      (1 + static_cast<float>(random() % 9) * 0x1p-12f));
  for (const Kernels* t : tables_under_test())
    for (const Real type : kReals)
      for (int from = 0; from < static_cast<int>(numbers.size());) {
        const int n = std::min<int>(from % 37, static_cast<int>(numbers.size()) - from);  // every tail
        Guarded source(n * 4, 4), out(n * size_of(type), size_of(type));
        std::copy_n(numbers.begin() + from, n, source.as<float>());
        t->store(out.as(), type, source.as<float>(), n);
        ASSERT_TRUE(out.intact());
        for (int i = 0; i < n; ++i) {
          const float x = numbers[from + i];
          uint16_t bits = 0;
          std::memcpy(&bits, out.as() + i * size_of(type), 2);
          const float have = type == Real::kF32    ? out.as<float>()[i]
                             : type == Real::kBf16 ? to_f32(bf16{bits})
                                                   : to_f32(f16{bits});
          const float want = rounded_to(type, x);
          if (std::isnan(want)) {
            ASSERT_TRUE(std::isnan(have)) << t->name << " " << x;
            continue;
          }
          ASSERT_EQ(std::bit_cast<uint32_t>(have), std::bit_cast<uint32_t>(want))
              << t->name << " type " << static_cast<int>(type) << ": " << x;
        }
        from += std::max(1, n);
      }
}

// The sums of the f32 loop are as many as it counts: none of them is another's.
TEST(Peak, SumsAreTheirOwn) {
  for (const Kernels* t : tables_under_test()) {
    std::vector<float> buffer(16384);
    for (size_t i = 0; i < buffer.size(); ++i) buffer[i] = static_cast<float>(i + 1) / 1024;
    const double once = t->peak_f32(1, buffer.data());
    const auto sums = static_cast<size_t>(once / 2);  // one fused multiply-add each
    const std::set<float> different(buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(sums));
    EXPECT_EQ(different.size(), sums) << t->name;
  }
}

TEST(Peak, CountsWhatItDid) {
  for (const Kernels* t : tables_under_test()) {
    Guarded buffer(65536);
    std::memset(buffer.as(), 0, buffer.size());
    EXPECT_GT(t->peak_s8(10, buffer.as()), 0) << t->name;
    EXPECT_GT(t->peak_f32(10, buffer.as()), 0) << t->name;
    if (t->peak_bf16) {
      EXPECT_GT(t->peak_bf16(10, buffer.as()), 0) << t->name;
    }
    t->read(buffer.as(), buffer.size());
    EXPECT_TRUE(buffer.intact()) << t->name;
  }
}

}  // namespace
}  // namespace kt::inline kernels
