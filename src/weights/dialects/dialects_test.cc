// Every packing against a loop over the definition, on tensors that live in memory.
#include "weights/dialects/dialects.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <functional>
#include <random>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "formats/floats.h"

namespace kt::inline weights {
namespace {

using testing::HasSubstr;

// Tensors of one module and what reads them.
struct Fixture {
  std::deque<std::vector<std::byte>> storage;
  std::deque<Tensor> tensors;
  std::deque<std::string> suffixes;
  std::vector<ExpertTensor> entries;
  ModelConfig config;
  RowChoice rows = RowChoice::kAll;
  bool transposed = false;
  int expert = -1;

  template <class T>
  void add(std::string suffix, Dtype dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
    storage.emplace_back(values.size() * sizeof(T));
    std::memcpy(storage.back().data(), values.data(), storage.back().size());
    suffixes.push_back(suffix);
    tensors.push_back(
        {.name = "m." + suffix, .dtype = dtype, .shape = std::move(shape), .bytes = storage.back()});
    entries.push_back({.suffix = suffixes.back(), .tensor = &tensors.back()});
  }
  Module module() const {
    return {.name = "m",
            .tensors = entries,
            .expert = expert,
            .rows = rows,
            .transposed = transposed,
            .config = &config};
  }
  std::unique_ptr<StoredMatrix> open() const {
    Reading headers = read_module(module());
    Reading reading = read_module_bytes(module());
    EXPECT_EQ(headers.planes.n, reading.planes.n);
    EXPECT_EQ(headers.planes.k, reading.planes.k);
    return plane_matrix("m", std::move(reading.planes));
  }
  std::string dialect() const { return std::string(read_module(module()).dialect); }
};

using Expected = std::function<float(int64_t, int64_t)>;

// rows() in pieces and values() at odd places, both against the definition.
void expect_matrix(const StoredMatrix& m, int64_t n, int64_t k, const Expected& expected) {
  ASSERT_EQ(m.n, n);
  ASSERT_EQ(m.k, k);
  const Matrix whole = m.matrix();
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < k; ++c)
      ASSERT_EQ(value_at(whole.view(), r, c), expected(r, c)) << "row " << r << " column " << c;
  const int64_t step = m.format.span.n;
  if (n > step) {
    const Matrix tail = m.rows(step, n - step);
    for (int64_t r = step; r < n; ++r)
      for (int64_t c = 0; c < k; ++c) ASSERT_EQ(value_at(tail.view(), r - step, c), expected(r, c));
  }
  for (const auto& [first, count] :
       {std::pair<int64_t, int64_t>{0, n}, {n / 3, n - n / 3}, {n - 1, 1}, {0, 0}}) {
    std::vector<float> values(static_cast<size_t>(count * k) + 1, -7.0f);
    m.values(first, count, values.data());
    for (int64_t r = 0; r < count; ++r)
      for (int64_t c = 0; c < k; ++c)
        ASSERT_EQ(values[r * k + c], expected(first + r, c)) << first + r << "," << c;
    EXPECT_EQ(values.back(), -7.0f);
  }
}

std::mt19937& random() {
  static std::mt19937 engine(7);
  return engine;
}

template <class T>
std::vector<T> random_bits(int64_t count, uint64_t mask = ~uint64_t{0}) {
  std::vector<T> out(static_cast<size_t>(count));
  for (T& value : out) value = static_cast<T>((random()() | uint64_t{random()()} << 32) & mask);
  return out;
}

std::vector<uint16_t> random_bf16(int64_t count) {
  std::vector<uint16_t> out;
  std::normal_distribution<float> normal(0, 0.02f);
  for (int64_t i = 0; i < count; ++i) out.push_back(to_bf16(normal(random())).bits);
  return out;
}
std::vector<uint16_t> random_f16(int64_t count) {  // denormals too, no infinities
  auto out = random_bits<uint16_t>(count);
  for (auto& bits : out)
    if ((bits & 0x7C00) == 0x7C00) bits &= 0x83FF;
  return out;
}
float bf(uint16_t bits) { return to_f32(bf16{bits}); }
float hf(uint16_t bits) { return to_f32(f16{bits}); }
uint32_t nibble(uint32_t word, int64_t i) { return (word >> (4 * i)) & 15; }

TEST(Dialects, PlainFloats) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {7, 13}, {130, 67}, {64, 128}}) {
    const auto b = random_bf16(n * k);
    Fixture f;
    f.add("weight", Dtype::kBf16, {n, k}, b);
    EXPECT_EQ(f.dialect(), "bf16");
    expect_matrix(*f.open(), n, k, [&](int64_t r, int64_t c) { return bf(b[r * k + c]); });
    const auto h = random_f16(n * k);
    Fixture g;
    g.add("weight", Dtype::kF16, {n, k}, h);
    EXPECT_EQ(g.dialect(), "fp16");
    expect_matrix(*g.open(), n, k, [&](int64_t r, int64_t c) { return hf(h[r * k + c]); });
  }
  Fixture f;
  f.add("weight", Dtype::kF32, {2, 2}, std::vector<float>{1, -2, 3.5f, 1e-39f});
  EXPECT_EQ(f.open()->matrix().format, format_named("f32"));
}

TEST(Dialects, EveryHalf) {
  std::vector<uint16_t> all;
  for (uint32_t bits = 0; bits < 65536; ++bits)
    if ((bits & 0x7C00) != 0x7C00) all.push_back(static_cast<uint16_t>(bits));
  Fixture f;
  f.add("weight", Dtype::kF16, {1, std::ssize(all)}, all);
  std::vector<float> values(all.size());
  f.open()->values(0, 1, values.data());
  for (size_t i = 0; i < all.size(); ++i)
    ASSERT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(hf(all[i]))) << all[i];
}

TEST(Dialects, NotFiniteIsNamed) {
  auto bits = random_bf16(20 * 30);
  bits[17 * 30 + 4] = 0x7F80;
  Fixture f;
  f.add("weight", Dtype::kBf16, {20, 30}, bits);
  std::vector<float> values(20 * 30);
  for (const auto& action : {std::function<void()>([&] { f.open()->matrix(); }),
                             std::function<void()>([&] { f.open()->values(3, 17, values.data()); })})
    EXPECT_THAT(error_of(action), HasSubstr("m: the weight of row 17, column 4 is not a finite number"));
  EXPECT_EQ(error_of([&] { f.open()->values(0, 17, values.data()); }), "no error");

  Fixture g;
  std::vector<uint8_t> codes(32 * 64, 0x12);
  codes[5 * 64 + 63] = 0xFF;
  g.add("weight", Dtype::kE4m3, {32, 64}, codes);
  g.add("weight_scale_inv", Dtype::kF32, {1, 1}, std::vector<float>{1});
  EXPECT_THAT(error_of([&] { g.open()->matrix(); }), HasSubstr("row 5, column 63"));
  EXPECT_THAT(error_of([&] { g.open()->values(5, 1, values.data()); }), HasSubstr("row 5, column 63"));

  Fixture h;
  std::vector<uint8_t> exponents(4 * 2, 127);
  exponents[3] = 255;
  h.add("weight", Dtype::kU8, {4, 32}, std::vector<uint8_t>(4 * 32, 0x21));
  h.add("scale", Dtype::kE8m0, {4, 2}, exponents);
  EXPECT_THAT(error_of([&] { h.open()->matrix(); }), HasSubstr("the scale of row 1, column 32"));
}

TEST(Dialects, Fp8Kinds) {
  const int64_t n = 300, k = 200;
  auto codes = random_bits<uint8_t>(n * k);
  for (auto& code : codes)
    if ((code & 0x7F) == 0x7F) code = 0;
  std::vector<float> grid(3 * 2), channel(n);
  for (auto& s : grid) s = std::ldexp(static_cast<float>(random()() % 1000 + 1), -14);
  for (auto& s : channel) s = std::ldexp(static_cast<float>(random()() % 1000 + 1), -14);
  Fixture block;
  block.add("weight", Dtype::kE4m3, {n, k}, codes);
  block.add("weight_scale_inv", Dtype::kF32, {3, 2}, grid);
  EXPECT_EQ(block.dialect(), "fp8");
  EXPECT_EQ(block.open()->format, format_named("fp8"));
  expect_matrix(*block.open(), n, k, [&](int64_t r, int64_t c) {
    return e4m3_to_f32(codes[r * k + c]) * grid[r / 128 * 2 + c / 128];
  });
  Fixture row;
  row.add("weight", Dtype::kE4m3, {n, k}, codes);
  row.add("weight_scale", Dtype::kF32, {n, 1}, channel);
  EXPECT_EQ(row.dialect(), "fp8-channel");
  EXPECT_EQ(row.open()->format, format_named("fp8_row"));
  expect_matrix(*row.open(), n, k,
                [&](int64_t r, int64_t c) { return e4m3_to_f32(codes[r * k + c]) * channel[r]; });
  Fixture one;
  one.add("weight", Dtype::kE4m3, {n, k}, codes);
  one.add("weight_scale", Dtype::kBf16, {}, std::vector<uint16_t>{to_bf16(0.25f).bits});
  expect_matrix(*one.open(), n, k,
                [&](int64_t r, int64_t c) { return e4m3_to_f32(codes[r * k + c]) * 0.25f; });
  const auto exponents = random_bits<uint8_t>(n * 7, 0x7F);
  Fixture mx;
  mx.add("weight", Dtype::kE4m3, {n, k}, codes);
  mx.add("weight_scale_inv", Dtype::kU8, {n, 7}, exponents);
  EXPECT_EQ(mx.dialect(), "mxfp8");
  expect_matrix(*mx.open(), n, k, [&](int64_t r, int64_t c) {
    return e4m3_to_f32(codes[r * k + c]) * e8m0_to_f32(exponents[r * 7 + c / 32]);
  });
  block.config.quantization.block_n = 64;
  EXPECT_THAT(error_of([&] { block.open(); }), HasSubstr("m.weight_scale_inv: expected [5, 2]"));
  Fixture wide;
  wide.add("weight", Dtype::kE5m2, {n, k}, codes);
  EXPECT_THAT(error_of([&] { wide.open(); }), HasSubstr("m.weight: expert weights of type F8_E5M2"));
}

TEST(Dialects, CompressedTensors) {
  const int64_t n = 24, k = 96, groups = 3;
  const auto scales = random_bf16(n * groups);
  const auto bytes = random_bits<uint8_t>(n * k / 2);
  const Expected expected = [&](int64_t r, int64_t c) {
    const int code = c % 2 == 0 ? bytes[(r * k + c) / 2] & 15 : bytes[(r * k + c) / 2] >> 4;
    return static_cast<float>(code - 8) * bf(scales[r * groups + c / 32]);
  };
  for (const bool words : {false, true}) {
    Fixture f;
    f.add("weight_packed", words ? Dtype::kI32 : Dtype::kU8, {n, words ? k / 8 : k / 2}, bytes);
    f.add("weight_scale", Dtype::kBf16, {n, groups}, scales);
    f.add("weight_shape", Dtype::kI64, {2}, std::vector<int64_t>{n, k});
    EXPECT_EQ(f.dialect(), "compressed-tensors");
    EXPECT_EQ(f.open()->format, format_named("int4_g32"));
    expect_matrix(*f.open(), n, k, expected);
  }
  const auto zeros = random_bits<uint32_t>(n / 8 * groups);
  Fixture asymmetric;
  asymmetric.add("weight_packed", Dtype::kI32, {n, k / 8}, bytes);
  asymmetric.add("weight_scale", Dtype::kBf16, {n, groups}, scales);
  asymmetric.add("weight_zero_point", Dtype::kI32, {n / 8, groups}, zeros);
  expect_matrix(*asymmetric.open(), n, k, [&](int64_t r, int64_t c) {
    const int code = c % 2 == 0 ? bytes[(r * k + c) / 2] & 15 : bytes[(r * k + c) / 2] >> 4;
    const int zero = static_cast<int>(nibble(zeros[r / 8 * groups + c / 32], r % 8));
    return static_cast<float>(code - zero) * bf(scales[r * groups + c / 32]);
  });
  Fixture wide;  // 8 bits, one scale a row
  const auto wide_bytes = random_bits<uint8_t>(n * k);
  wide.config.quantization.bits = 8;
  wide.add("weight_packed", Dtype::kI32, {n, k / 4}, wide_bytes);
  wide.add("weight_scale", Dtype::kBf16, {n, 1}, random_bf16(n));
  const Matrix m = wide.open()->matrix();
  EXPECT_EQ(m.format.code, Code::kI8);
  for (int64_t i = 0; i < n * k; ++i)
    ASSERT_EQ(static_cast<int8_t>(m.codes[i]), static_cast<int>(wide_bytes[i]) - 128);
}

TEST(Dialects, CompressedShape) {
  const int64_t n = 8, k = 21;  // three words a row, the last one part used
  const auto words = random_bits<uint32_t>(n * 3);
  const auto scales = random_bf16(n);
  Fixture f;
  f.add("weight_packed", Dtype::kI32, {n, 3}, words);
  f.add("weight_scale", Dtype::kBf16, {n, 1}, scales);
  f.add("weight_shape", Dtype::kI64, {2}, std::vector<int64_t>{n, k});
  expect_matrix(*f.open(), n, k, [&](int64_t r, int64_t c) {
    return static_cast<float>(static_cast<int>(nibble(words[r * 3 + c / 8], c % 8)) - 8) * bf(scales[r]);
  });
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{9, 21}, {8, 25}, {8, 16}, {8, -1}}) {
    Fixture bad;
    bad.add("weight_packed", Dtype::kI32, {n, 3}, words);
    bad.add("weight_scale", Dtype::kBf16, {n, 1}, scales);
    bad.add("weight_shape", Dtype::kI64, {2}, std::vector<int64_t>{rows, columns});
    EXPECT_THAT(error_of([&] { bad.open(); }), HasSubstr("m.weight_shape: says"));
  }
}

struct Gptq {
  int64_t n = 32, k = 128, groups = 4;
  std::vector<uint32_t> words = random_bits<uint32_t>(k / 8 * n),
                        zeros = random_bits<uint32_t>(groups * n / 8);
  std::vector<uint16_t> scales = random_f16(groups * n);
  std::vector<int32_t> index;
  Gptq() {
    for (int64_t c = 0; c < k; ++c) index.push_back(static_cast<int32_t>(c / (k / groups)));
  }
  void fill(Fixture& f) const {
    f.add("qweight", Dtype::kI32, {k / 8, n}, words);
    f.add("qzeros", Dtype::kI32, {groups, n / 8}, zeros);
    f.add("scales", Dtype::kF16, {groups, n}, scales);
    f.add("g_idx", Dtype::kI32, {k}, index);
  }
  float value(int64_t r, int64_t c, int plus) const {
    const int code = static_cast<int>(nibble(words[c / 8 * n + r], c % 8));
    const int zero = static_cast<int>(nibble(zeros[index[c] * (n / 8) + r / 8], r % 8)) + plus;
    return static_cast<float>(code - zero) * hf(scales[index[c] * n + r]);
  }
};

TEST(Dialects, Gptq) {
  Gptq q;
  for (const std::string version : {"gptq", "gptq_v2"}) {
    Fixture f;
    f.config.quantization.checkpoint_format = version;
    q.fill(f);
    EXPECT_EQ(f.dialect(), "gptq");
    EXPECT_EQ(f.open()->format, format_named("int4_g32_zero"));
    expect_matrix(*f.open(), q.n, q.k,
                  [&](int64_t r, int64_t c) { return q.value(r, c, version == "gptq" ? 1 : 0); });
  }
}

TEST(Dialects, GptqSymmetric) {
  const Format symmetric{Code::kU4, 8, Scale::kF16, Min::kNone, {.k = 32}};
  struct Case {
    uint32_t stored;
    std::string version;
    bool symmetric;
    int plus;
    bool bias;
  };
  for (const Case& c : {Case{0x77777777, "gptq", true, 1, true},
                        {0x88888888, "gptq", true, 0, true},
                        {0x88888888, "gptq", false, 1, false},
                        {0x88888888, "gptq_v2", false, 0, true},
                        {0x77777777, "gptq_v2", true, 0, false}}) {
    Gptq q;
    std::ranges::fill(q.zeros, c.stored);
    Fixture f;
    f.config.quantization.checkpoint_format = c.version;
    f.config.quantization.symmetric = c.symmetric;
    q.fill(f);
    EXPECT_EQ(f.open()->format == symmetric, c.bias) << c.stored << c.version;
    expect_matrix(*f.open(), q.n, q.k, [&](int64_t r, int64_t col) { return q.value(r, col, c.plus); });
  }
}

TEST(Dialects, GptqActivationOrder) {
  Gptq q;
  std::ranges::shuffle(q.index, random());
  Fixture f;
  q.fill(f);
  expect_matrix(*f.open(), q.n, q.k, [&](int64_t r, int64_t c) { return q.value(r, c, 1); });
  Gptq blocks;  // groups out of order, but in stretches of 16
  for (int64_t c = 0; c < blocks.k; ++c) blocks.index[c] = static_cast<int32_t>((c / 16 * 3) % 4);
  Fixture g;
  blocks.fill(g);
  EXPECT_EQ(g.open()->format.span.k, 16);
  expect_matrix(*g.open(), blocks.n, blocks.k, [&](int64_t r, int64_t c) { return blocks.value(r, c, 1); });
  Gptq bad;
  bad.index[5] = 4;
  Fixture h;
  bad.fill(h);
  EXPECT_THAT(error_of([&] { h.open(); }), HasSubstr("m.g_idx: column 5 is in group 4, expected 0 to 3"));
  Gptq zero;
  std::ranges::fill(zero.index, 0);
  Fixture z;
  zero.fill(z);
  EXPECT_THAT(error_of([&] { z.open(); }), HasSubstr("m.g_idx: no column is in group 1 of 4"));
}

TEST(Dialects, Awq) {
  const int64_t n = 40, k = 128, groups = 2;
  const int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // nibble i holds row order[i]
  const auto words = random_bits<uint32_t>(k * n / 8), zeros = random_bits<uint32_t>(groups * n / 8);
  const auto scales = random_f16(groups * n);
  const auto nibble_of = [&](uint32_t word, int64_t row) {
    for (int i = 0; i < 8; ++i)
      if (order[i] == row % 8) return static_cast<int>(nibble(word, i));
    return -1;
  };
  Fixture f;
  f.add("qweight", Dtype::kI32, {k, n / 8}, words);
  f.add("qzeros", Dtype::kI32, {groups, n / 8}, zeros);
  f.add("scales", Dtype::kF16, {groups, n}, scales);
  EXPECT_EQ(f.dialect(), "awq");
  EXPECT_EQ(f.open()->format, format_named("int4_g64_zero"));
  expect_matrix(*f.open(), n, k, [&](int64_t r, int64_t c) {
    const int zero = nibble_of(zeros[c / 64 * (n / 8) + r / 8], r);
    return static_cast<float>(nibble_of(words[c * (n / 8) + r / 8], r) - zero) * hf(scales[c / 64 * n + r]);
  });
  f.config.quantization.method = "gptq";
  EXPECT_THAT(error_of([&] { f.open(); }), HasSubstr("fits neither GPTQ nor AWQ"));
}

TEST(Dialects, Mxfp4) {
  const int64_t experts = 2, inter = 12, k = 64;
  const auto bytes = random_bits<uint8_t>(experts * 2 * inter * k / 2);
  const auto exponents = random_bits<uint8_t>(experts * 2 * inter * 2, 0x7F);
  Fixture f;
  f.add("blocks", Dtype::kU8, {experts, 2 * inter, k / 32, 16}, bytes);
  f.add("scales", Dtype::kU8, {experts, 2 * inter, k / 32}, exponents);
  std::vector<uint16_t> biases = random_bf16(experts * 2 * inter);
  f.add("bias", Dtype::kBf16, {experts, 2 * inter}, biases);
  f.expert = 1;
  for (const RowChoice choice : {RowChoice::kEven, RowChoice::kOdd}) {
    f.rows = choice;
    const int64_t odd = choice == RowChoice::kOdd ? 1 : 0;
    expect_matrix(*f.open(), inter, k, [&](int64_t r, int64_t c) {
      const int64_t row = 2 * inter + 2 * r + odd;
      const uint8_t byte = bytes[row * k / 2 + c / 2];
      return e2m1_to_f32(c % 2 == 0 ? byte & 15 : byte >> 4) * e8m0_to_f32(exponents[row * 2 + c / 32]);
    });
    const auto bias = read_bias(f.module());
    ASSERT_TRUE(bias);
    ASSERT_EQ(std::ssize(*bias), inter);
    for (int64_t r = 0; r < inter; ++r) EXPECT_EQ((*bias)[r], bf(biases[2 * inter + 2 * r + odd]));
  }
  EXPECT_EQ(f.open()->format, format_named("mxfp4"));
}

TEST(Dialects, Nvfp4) {
  const int64_t n = 37, k = 96;
  const auto bytes = random_bits<uint8_t>(n * k / 2);
  auto scales = random_bits<uint8_t>(n * k / 16);
  for (uint8_t& scale : scales) scale %= 127;
  const float factor = 3.1e-4f;
  Fixture f;
  f.add("weight", Dtype::kU8, {n, k / 2}, bytes);
  f.add("weight_scale", Dtype::kE4m3, {n, k / 16}, scales);
  f.add("input_scale", Dtype::kF32, {}, std::vector<float>{1});
  EXPECT_THAT(error_of([&] { f.open(); }), HasSubstr("m.weight_scale: expected a weight_scale_2"));
  f.add("weight_scale_2", Dtype::kF32, {}, std::vector<float>{factor});
  expect_matrix(*f.open(), n, k, [&](int64_t r, int64_t c) {
    const uint8_t byte = bytes[r * k / 2 + c / 2];
    return e2m1_to_f32(c % 2 == 0 ? byte & 15 : byte >> 4) *
           (e4m3_to_f32(scales[r * k / 16 + c / 16]) * factor);
  });
  Fixture narrow;
  narrow.add("weight", Dtype::kU8, {n, k / 2}, bytes);
  narrow.add("weight_scale", Dtype::kE4m3, {n, k / 32}, std::vector<uint8_t>(n * k / 32));
  narrow.add("weight_scale_2", Dtype::kF32, {}, std::vector<float>{factor});
  EXPECT_THAT(error_of([&] { narrow.open(); }), AllOf(HasSubstr("[37, 6]"), HasSubstr("[37, 3]")));
}

TEST(Dialects, TransposedFused) {
  const int64_t experts = 2, inter = 70, hidden = 131;
  const auto bits = random_bf16(experts * hidden * 2 * inter);
  Fixture f;
  f.add("", Dtype::kBf16, {experts, hidden, 2 * inter}, bits);
  f.expert = 1;
  f.transposed = true;
  const auto stored = [&](int64_t column, int64_t row) {
    return bf(bits[(hidden + column) * 2 * inter + row]);
  };
  f.rows = RowChoice::kSecondHalf;
  expect_matrix(*f.open(), inter, hidden, [&](int64_t r, int64_t c) { return stored(c, inter + r); });
  f.rows = RowChoice::kOdd;
  expect_matrix(*f.open(), inter, hidden, [&](int64_t r, int64_t c) { return stored(c, 2 * r + 1); });
}

TEST(Dialects, TransposedFp8) {
  const int64_t experts = 2, inter = 96, hidden = 131, rows = 2 * inter;
  auto codes = random_bits<uint8_t>(experts * hidden * rows);
  for (auto& code : codes)
    if ((code & 0x7F) == 0x7F) code = 0;
  std::vector<float> grid(experts * 5 * 6), channel(experts * rows);  // blocks of 32 along both sides
  for (auto* scales : {&grid, &channel})
    for (float& s : *scales) s = std::ldexp(static_cast<float>(random()() % 1000 + 1), -14);
  const auto code = [&](int64_t r, int64_t c) { return e4m3_to_f32(codes[(hidden + c) * rows + r]); };
  for (const bool blocks : {true, false}) {
    Fixture f;
    f.config.quantization.block_n = f.config.quantization.block_k = 32;
    f.add("", Dtype::kE4m3, {experts, hidden, rows}, codes);
    if (blocks)
      f.add("scale_inv", Dtype::kF32, {experts, 5, 6}, grid);
    else
      f.add("scale", Dtype::kF32, {experts, 1, rows}, channel);
    f.expert = 1;
    f.transposed = true;
    EXPECT_EQ(f.dialect(), blocks ? "fp8" : "fp8-channel");
    const auto scale = [&](int64_t r, int64_t c) {
      return blocks ? grid[30 + c / 32 * 6 + r / 32] : channel[rows + r];
    };
    f.rows = RowChoice::kSecondHalf;
    expect_matrix(*f.open(), inter, hidden,
                  [&](int64_t r, int64_t c) { return code(inter + r, c) * scale(inter + r, c); });
    f.rows = RowChoice::kOdd;
    if (blocks) {
      EXPECT_THAT(error_of([&] { f.open(); }), HasSubstr("rows from 1 by 2 cut scale blocks of 32 rows"));
    } else {
      expect_matrix(*f.open(), inter, hidden,
                    [&](int64_t r, int64_t c) { return code(2 * r + 1, c) * scale(2 * r + 1, c); });
    }
  }
}

TEST(Dialects, Gguf) {
  const int64_t n = 6, k = 64;
  std::vector<float> values(static_cast<size_t>(n * k));
  std::normal_distribution<float> normal(0, 1);
  for (float& v : values) v = normal(random());
  const Matrix m = quantise(format_named("q4_0"), values, n, k);
  const auto blocks = gguf_from_matrix(GgufType::kQ4_0, m.view());
  Fixture f;
  f.add("weight", Dtype::kGguf, {3, n / 3, k}, blocks);
  f.tensors.back().gguf_type = 2;
  f.expert = 2;
  expect_matrix(*f.open(), n / 3, k, [&](int64_t r, int64_t c) { return value_at(m.view(), 4 + r, c); });
  f.tensors.back().gguf_type = 34;
  EXPECT_THAT(error_of([&] { f.open(); }), HasSubstr("m.weight: expert weights of type"));
}

TEST(Dialects, RefusedByName) {
  Fixture f;
  f.add("weight_packed", Dtype::kU8, {8, 16}, std::vector<uint8_t>(8 * 16));
  f.add("weight_scale", Dtype::kE4m3, {8, 2}, std::vector<uint8_t>(16));
  f.add("weight_global_scale", Dtype::kF32, {1}, std::vector<float>(1));
  EXPECT_THAT(error_of([&] { f.open(); }),
              HasSubstr("m.weight_global_scale: experts with 'weight_global_scale'"));
  Fixture g;
  g.add("weight", Dtype::kE4m3, {8, 16}, std::vector<uint8_t>(8 * 16));
  EXPECT_THAT(error_of([&] { g.open(); }), HasSubstr("m.weight: F8_E4M3 without"));
  Fixture three;
  three.config.quantization.bits = 3;
  Gptq{}.fill(three);
  EXPECT_THAT(error_of([&] { three.open(); }), HasSubstr("3-bit weights are not read"));
}

}  // namespace
}  // namespace kt::inline weights
