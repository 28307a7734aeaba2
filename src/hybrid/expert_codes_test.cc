// Stored experts in memory: the same bits as the values that they were rounded from, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/testing/error_of.h"
#include "formats/gguf_blocks.h"
#include "hybrid/testing/test_layer.h"

namespace kt::inline hybrid {
namespace {

using ::testing::HasSubstr;

constexpr ExpertsShape kCodedShape{.experts = 3, .hidden = 256, .inter = 128};

ExpertLayer coded_layer(const std::string& method) {
  return {CpuTeam::shared({.threads = 2, .nodes = 1}),
          {.shape = kCodedShape, .top_k = 2, .method = method, .group_size = 32, .zero_point = false}};
}

std::vector<float> forward_of(ExpertLayer& layer) {
  const TestBatch batch(5, 7, kCodedShape, 2);
  std::vector<float> out(batch.input.size());
  layer.forward(batch.call(), out.data());
  return out;
}

// One projection of all experts, as checkpoints store it.
struct StoredSide {
  std::vector<uint8_t> codes, scales;

  StoredSide(const std::string& method, const Format& format, const std::vector<float>& values, int64_t n,
             int64_t k) {
    for (int expert = 0; expert < kCodedShape.experts; ++expert) {
      const auto size = static_cast<size_t>(n * k);
      const Matrix m =
          quantise(format, std::span(values).subspan(static_cast<size_t>(expert) * size, size), n, k);
      if (method == "LLAMAFILE")
        append_blocks(m);
      else if (code_bits(format.code) == 4)
        for (size_t i = 0; i < m.codes.size(); i += 2)
          codes.push_back(static_cast<uint8_t>(m.codes[i] | m.codes[i + 1] << 4));
      else
        codes.insert(codes.end(), m.codes.begin(), m.codes.end());
      if (method == "MXFP4")
        for (const uint8_t exponent : m.scales) {
          const bf16 scale = to_bf16(e8m0_to_f32(exponent));
          scales.push_back(static_cast<uint8_t>(scale.bits));
          scales.push_back(static_cast<uint8_t>(scale.bits >> 8));
        }
      else
        scales.insert(scales.end(), m.scales.begin(), m.scales.end());
    }
  }

  ExpertCodes::Side side(const Format& format) const {
    const auto type = gguf_type(format);
    return {.codes = {codes.data()},
            .scales = {scales.data()},
            .gguf_type = type ? static_cast<uint32_t>(*type) : 0};
  }

 private:
  void append_blocks(const Matrix& m) {
    const std::vector<std::byte> blocks = gguf_from_matrix(*gguf_type(m.format), m.view());
    for (const std::byte b : blocks) codes.push_back(static_cast<uint8_t>(b));
  }
};

TEST(ExpertCodes, GiveTheBitsOfValues) {
  const size_t size = static_cast<size_t>(kCodedShape.experts * kCodedShape.hidden * kCodedShape.inter);
  const std::vector<float> gate = random_values(size, 1, 0.1f), up = random_values(size, 2, 0.1f),
                           down = random_values(size, 3, 0.1f);
  for (const std::string method :
       {"BF16", "FP8", "FP8_PERCHANNEL", "RAWINT4", "MXFP4", "MXFP8", "LLAMAFILE"}) {
    ExpertLayer layer = coded_layer(method);
    const auto [gate_up, to_down] =
        formats_of(weight_method_named(method), kCodedShape.hidden, kCodedShape.inter, 32, false);
    layer.load_values({gate.data(), up.data(), down.data(), Real::kF32}, {});
    const std::vector<float> want = forward_of(layer);
    const StoredSide g(method, gate_up, gate, kCodedShape.inter, kCodedShape.hidden),
        u(method, gate_up, up, kCodedShape.inter, kCodedShape.hidden),
        d(method, to_down, down, kCodedShape.hidden, kCodedShape.inter);
    const ExpertCodes codes{.gate = g.side(gate_up), .up = u.side(gate_up), .down = d.side(to_down)};
    ExpertLayer coded = coded_layer(method);
    // In a task of the team, which takes its turn at once.
    coded.team().wait(coded.team().submit([&] { coded.load_codes(codes, {}); }));
    coded.team().sync();
    EXPECT_EQ(forward_of(coded), want) << method;
  }
}

TEST(ExpertCodes, Refuse) {
  const uint8_t byte = 0;
  const ExpertCodes::Side one{.codes = {&byte}, .scales = {&byte}}, none{},
      two{.codes = {&byte, &byte}, .scales = {&byte}};
  const auto refused = [](const std::string& method, const ExpertCodes& codes) {
    return error_of([&] { coded_layer(method).load_codes(codes, {}); });
  };
  EXPECT_THAT(refused("AMXINT4", {one, one, one}),
              HasSubstr("weights of method AMXINT4 are not read from codes; those of BF16, FP8"));
  EXPECT_THAT(refused("RAWINT4", {one, none, one}), HasSubstr("layer 0 up: 0 addresses for 3 experts"));
  EXPECT_THAT(refused("RAWINT4", {one, one, two}), HasSubstr("layer 0 down: 2 addresses for 3 experts"));
  EXPECT_THAT(refused("RAWINT4", {{.codes = {nullptr}, .scales = {&byte}}, one, one}),
              HasSubstr("layer 0 gate: a null address for expert 0"));
  EXPECT_THAT(refused("LLAMAFILE", {{.codes = {&byte}, .gguf_type = 77}, one, one}),
              HasSubstr("layer 0 gate: weights of GGUF type 77 are not read"));
}

TEST(ExpertCodes, ForwardAddsToTheOutputWhereAsked) {
  ExpertLayer layer = coded_layer("BF16");
  const size_t size = static_cast<size_t>(kCodedShape.experts * kCodedShape.hidden * kCodedShape.inter);
  const std::vector<float> values = random_values(size, 1, 0.1f);
  layer.load_values({values.data(), values.data(), values.data(), Real::kF32}, {});
  const TestBatch batch(5, 7, kCodedShape, 2);
  std::vector<float> out = random_values(batch.input.size(), 9);
  const std::vector<float> want = sum_of(forward_of(layer), out);
  LayerCall call = batch.call();
  call.adds = true;
  layer.forward(call, out.data());
  EXPECT_EQ(out, want);
}

}  // namespace
}  // namespace kt::inline hybrid
