// Buffers for GPU ranks against the table of the Python contract, read from the matrices that quantise()
// gives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "hybrid/testing/test_layer.h"

namespace kt::inline hybrid {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Ne;

constexpr ExpertsShape kWrittenShape{.experts = 2, .hidden = 160, .inter = 1024};
constexpr int kGroup = 32;

struct WrittenValues {
  std::vector<float> gate, up, down;
  explicit WrittenValues(const ExpertsShape& shape) {
    const size_t size = static_cast<size_t>(shape.experts * shape.hidden) * static_cast<size_t>(shape.inter);
    gate = random_values(size, 1, 0.1f);
    up = random_values(size, 2, 0.1f);
    down = random_values(size, 3, 0.1f);
  }
  ExpertValues view() const { return {gate.data(), up.data(), down.data(), Real::kF32}; }
};

ExpertLayer made_for_writing(const char* method, int nodes, const ExpertsShape& shape) {
  return {CpuTeam::shared({.threads = std::max(2, nodes), .nodes = nodes}),
          {.shape = shape, .top_k = 1, .method = method, .group_size = kGroup, .zero_point = true}};
}

struct RankBuffers {
  std::vector<std::byte> w13, w13_scale, w2, w2_scale;
  RankBuffers(const ExpertLayer& layer, int ranks)
      : w13(layer.w13_bytes(ranks), std::byte{0xCC}),
        w13_scale(layer.w13_scale_bytes(ranks), std::byte{0xCC}),
        w2(layer.w2_bytes(ranks), std::byte{0xCC}),
        w2_scale(layer.w2_scale_bytes(ranks), std::byte{0xCC}) {}
  ExpertBuffers view() {
    const auto pointer = [](std::vector<std::byte>& v) { return v.empty() ? nullptr : v.data(); };
    return {pointer(w13), pointer(w13_scale), pointer(w2), pointer(w2_scale)};
  }
};

template <typename T>
T at(const std::vector<std::byte>& bytes, int64_t index) {
  T out;
  std::memcpy(&out, bytes.data() + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return out;
}

// What one entry of a buffer of rows of `k` codes, with `spans` scales for each row or block of rows, stands
// for.
struct Reader {
  std::string_view method;
  const std::vector<std::byte>& codes;
  const std::vector<std::byte>& scales;
  int64_t k, spans;

  float value(int64_t row, int64_t column, int64_t scale_row) const {
    const int64_t i = row * k + column;
    const auto nibble = [&] {
      const auto byte = at<uint8_t>(codes, i / 2);
      return static_cast<uint8_t>(i % 2 ? byte >> 4 : byte & 15);
    };
    const auto scale_index = [&](int64_t span) { return scale_row * spans + (span ? column / span : 0); };
    if (method == "FP8" || method == "FP8_PERCHANNEL")
      return e4m3_to_f32(at<uint8_t>(codes, i)) * at<float>(scales, scale_index(method == "FP8" ? 128 : 0));
    if (method == "MXFP8")
      return e4m3_to_f32(at<uint8_t>(codes, i)) * e8m0_to_f32(at<uint8_t>(scales, scale_index(32)));
    if (method == "RAWINT4")
      return static_cast<float>(nibble() - 8) * to_f32(at<bf16>(scales, scale_index(kGroup)));
    if (method == "MXFP4") return e2m1_to_f32(nibble()) * to_f32(at<bf16>(scales, scale_index(32)));
    return to_f32(at<bf16>(codes, i));
  }
};

void check_ranks(ExpertLayer& layer, const WrittenValues& values, int ranks) {
  const auto [experts, hidden, inter] = layer.options().shape;
  const std::string& method = layer.options().method;
  const int64_t share = inter / ranks, expert = 1, size = int64_t{hidden} * inter;
  std::vector<RankBuffers> buffers(static_cast<size_t>(ranks), RankBuffers(layer, ranks));
  std::vector<ExpertBuffers> views;
  for (RankBuffers& b : buffers) views.push_back(b.view());
  layer.submit_write(expert, views);
  layer.sync_write();
  const MethodFormats formats = formats_of(weight_method_named(method), hidden, inter, kGroup, true);
  const auto plain = [&](const std::vector<float>& all, const Format& format, int64_t n, int64_t k) {
    return quantise(
        format, std::span(all).subspan(static_cast<size_t>(expert * size), static_cast<size_t>(size)), n, k);
  };
  const Matrix in[] = {plain(values.gate, formats.gate_up, inter, hidden),
                       plain(values.up, formats.gate_up, inter, hidden)};
  const Matrix down = plain(values.down, formats.down, hidden, inter);
  const bool narrow = method != "FP8" && method != "FP8_PERCHANNEL" && method != "RAWINT4" &&
                      method != "MXFP4" && method != "MXFP8";
  const auto wanted = [&](const Matrix& w, int64_t row, int64_t column) {
    const float value = value_at(w.view(), row, column);
    return narrow ? to_f32(to_bf16(value)) : value;
  };
  const int block = method == "FP8" ? 128 : 1;
  for (int rank = 0; rank < ranks; ++rank) {
    const RankBuffers& b = buffers[static_cast<size_t>(rank)];
    const Reader w13{method, b.w13, b.w13_scale, hidden, spans(formats.gate_up, hidden)};
    for (int64_t row = 0; row < 2 * share; ++row) {
      const int64_t half = row / share, mine = row % share;
      const int64_t scale_row = half * ((share + block - 1) / block) + mine / block;
      for (int64_t k = 0; k < hidden; ++k)
        ASSERT_EQ(w13.value(row, k, scale_row), wanted(in[half], rank * share + mine, k))
            << method << " ranks " << ranks << " rank " << rank << " row " << row << " column " << k;
    }
    const Reader w2{method, b.w2, b.w2_scale, share, spans(formats.down, share)};
    for (int64_t row = 0; row < hidden; ++row)
      for (int64_t k = 0; k < share; ++k)
        ASSERT_EQ(w2.value(row, k, row / block), wanted(down, row, rank * share + k))
            << method << " ranks " << ranks << " rank " << rank << " w2 row " << row << " column " << k;
  }
}

TEST(ExpertWrite, EveryMethodRanksAndNodes) {
  const WrittenValues values(kWrittenShape);
  for (const WeightMethod& method : weight_methods())
    for (const int nodes : {1, 3}) {
      ExpertLayer layer = made_for_writing(std::string(method.name).c_str(), nodes, kWrittenShape);
      layer.load_values(values.view(), {});
      for (const int ranks : {1, 2, 8}) check_ranks(layer, values, ranks);
    }
}

TEST(ExpertWrite, SharesThatAreNoWholeRowBlocks) {
  const ExpertsShape shape{.experts = 2, .hidden = 33, .inter = 104};
  const WrittenValues values(shape);
  for (const char* method : {"BF16", "AMXINT4", "AMXINT8"}) {
    ExpertLayer layer = made_for_writing(method, 2, shape);
    layer.load_values(values.view(), {});
    for (const int ranks : {1, 2, 4, 8}) check_ranks(layer, values, ranks);
  }
}

TEST(ExpertWrite, SizesOfTheTable) {
  const ExpertLayer fp8 = made_for_writing("FP8", 1, kWrittenShape),
                    raw = made_for_writing("RAWINT4", 1, kWrittenShape),
                    mx = made_for_writing("MXFP8", 1, kWrittenShape);
  EXPECT_EQ(fp8.w13_bytes(2), 2u * 512 * 160);
  EXPECT_EQ(fp8.w13_scale_bytes(2), 2u * 4 * 2 * 4);
  EXPECT_EQ(fp8.w2_scale_bytes(2), 2u * 4 * 4);
  EXPECT_EQ(raw.w13_bytes(4), 2u * 256 * 80);
  EXPECT_EQ(raw.w13_scale_bytes(4), 2u * 256 * 5 * 2);
  EXPECT_EQ(raw.w2_scale_bytes(4), 160u * 8 * 2);
  EXPECT_EQ(mx.w2_scale_bytes(8), 160u * 4);
  EXPECT_EQ(made_for_writing("GPTQ_INT4", 1, kWrittenShape).w13_bytes(1), 2u * 1024 * 160 * 2);
  EXPECT_EQ(made_for_writing("GPTQ_INT4", 1, kWrittenShape).w2_scale_bytes(1), 0u);
}

TEST(ExpertWrite, NamesWhatCannotBeCut) {
  const ExpertsShape shape{.experts = 2, .hidden = 128, .inter = 384};
  ExpertLayer layer = made_for_writing("FP8", 1, shape);
  EXPECT_THAT(error_of([&] { layer.w13_bytes(2); }),
              AllOf(HasSubstr("384"), HasSubstr("2 ranks"), HasSubstr("128")));
  EXPECT_THAT(error_of([&] { layer.w13_bytes(3); }), HasSubstr("3 ranks"));
  EXPECT_THAT(error_of([&] { layer.submit_write(0, {}); }), HasSubstr("no weights"));
  const WrittenValues values(shape);
  layer.load_values(values.view(), {});
  RankBuffers buffers(layer, 1);
  ExpertBuffers view = buffers.view();
  EXPECT_THAT(error_of([&] { layer.submit_write(2, {&view, 1}); }),
              AllOf(HasSubstr("expert 2"), HasSubstr("1")));
  view.w2_scale = nullptr;
  EXPECT_THAT(error_of([&] { layer.submit_write(0, {&view, 1}); }), HasSubstr("scales of w2"));
  EXPECT_THAT(error_of([&] { layer.submit_write(0, {}); }), HasSubstr("0 ranks"));
  const ExpertLayer odd = made_for_writing("BF16", 1, {.experts = 1, .hidden = 16, .inter = 36});
  EXPECT_THAT(error_of([&] { odd.w2_bytes(8); }), AllOf(HasSubstr("36"), HasSubstr("8 ranks")));
}

TEST(ExpertWrite, ErrorsOfOtherWorkAreNotItsOwn) {
  const auto layer = test_layer(CpuTeam::shared({.threads = 2}));
  std::vector<uint8_t> w13(layer->w13_bytes(1)), w2(layer->w2_bytes(1));
  const ExpertBuffers view{.w13 = w13.data(), .w2 = w2.data()};
  layer->team().submit([] { fail("of somebody else"); });
  layer->submit_write(1, {&view, 1});
  layer->sync_write();
  EXPECT_THAT(w2, Contains(Ne(0)));
  EXPECT_THAT(error_of([&] { layer->team().sync(); }), HasSubstr("of somebody else"));
}

}  // namespace
}  // namespace kt::inline hybrid
