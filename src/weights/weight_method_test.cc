#include "weights/weight_method.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "weights/kt/kt_plan.h"
#include "weights/testing/tiny_model.h"

namespace kt::inline weights {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(WeightMethod, UnknownNamesGetTheList) {
  EXPECT_EQ(weight_method_named("MXFP4").name, "MXFP4");
  const std::string error = error_of([] { weight_method_named("AMXINT5"); });
  for (const WeightMethod& method : weight_methods())
    EXPECT_THAT(error, AllOf(HasSubstr("AMXINT5"), HasSubstr(std::string(method.name))));
  EXPECT_EQ(weight_methods().size(), 12u);
}

TEST(WeightMethod, KnowsShortNamesInAnyCase) {
  for (const WeightMethod& method : weight_methods()) {
    EXPECT_EQ(&weight_method_named(method.name), &method);
    if (!method.word.empty()) {
      EXPECT_EQ(&weight_method_named(method.word), &method);
    }
  }
  EXPECT_EQ(weight_method_named("Int4").name, "AMXINT4");
  EXPECT_EQ(weight_method_named("fp8_perchannel").name, "FP8_PERCHANNEL");
  EXPECT_EQ(weight_method_named("GGUF").name, "LLAMAFILE");
  EXPECT_THROW(weight_method_named(""), Error);
}

TEST(WeightMethod, FormatsOfValues) {
  const auto names = [](const char* method, int64_t hidden, int64_t inter, int group, bool zero) {
    const MethodFormats f = formats_of(weight_method_named(method), hidden, inter, group, zero);
    return text("{} {}", name_of(f.gate_up), name_of(f.down));
  };
  EXPECT_EQ(names("AMXINT4", 64, 96, 128, true), "int4 int4");
  EXPECT_EQ(names("MOE_INT8", 64, 96, 128, true), "int8 int8");
  EXPECT_EQ(names("RAWINT4", 64, 96, 32, true), "int4_g32 int4_g32");
  EXPECT_EQ(names("GPTQ_INT4", 64, 96, 64, true), "int4_g64_zero int4_g64_zero");
  EXPECT_EQ(names("GPTQ_INT4", 64, 96, 32, false), "q4_0 q4_0");  // the same numbers under another name
  EXPECT_EQ(names("FP8", 64, 96, 128, true), "fp8 fp8");
  EXPECT_EQ(names("FP8_PERCHANNEL", 64, 96, 128, true), "fp8_row fp8_row");
  EXPECT_EQ(names("MXFP4", 64, 96, 128, true), "mxfp4 mxfp4");
  EXPECT_EQ(names("LLAMAFILE", 512, 96, 128, true), "q4_k q4_0");
  for (const int group : {0, -32, 24})
    EXPECT_THAT(error_of([&] { names("RAWINT4", 64, 96, group, true); }),
                AllOf(HasSubstr("RAWINT4"), HasSubstr(std::to_string(group))));
}

class WeightSources : public testing::Test {
 protected:
  WeightSources() { write_tiny_model({}, folder_ / "bf16"); }
  std::string converted(int bits, int parts, bool merge) {
    const std::string out = folder_ / text("kt_{}_{}_{}", bits, parts, merge);
    const Checkpoint checkpoint(folder_ / "bf16");
    const auto source = open_experts(checkpoint);
    run_conversion(
        plan_kt_weights(checkpoint, *source, {.output = out, .bits = bits, .parts = parts, .merge = merge}),
        {.threads = 1});
    return out;
  }
  static std::string mismatch(const char* method, const std::string& path, int layer = 1) {
    return error_of([&] { check_method(weight_method_named(method), *open_experts(path), layer, path); });
  }
  TemporaryFolder folder_;
};

TEST_F(WeightSources, NamesWhatIsNotThere) {
  EXPECT_THAT(error_of([&] { open_experts(folder_ / "none"); }), HasSubstr(folder_ / "none"));
  std::filesystem::create_directories(folder_ / "empty");
  EXPECT_THAT(error_of([&] { open_experts(folder_ / "empty"); }), HasSubstr(folder_ / "empty"));
  EXPECT_THAT(mismatch("BF16", folder_ / "bf16", 0), AllOf(HasSubstr("layer 0"), HasSubstr("from 1 to 2")));
}

TEST_F(WeightSources, NamesTheMethodThatFits) {
  const std::string bf16 = folder_ / "bf16", int8 = converted(8, 2, true), int4 = converted(4, 1, false);
  EXPECT_EQ(mismatch("BF16", bf16), "no error");
  for (const char* method : {"AMXINT4", "AMXINT8", "MOE_INT4", "MOE_INT8"})
    EXPECT_EQ(mismatch(method, bf16), "no error") << method;
  EXPECT_THAT(mismatch("FP8", bf16),
              AllOf(HasSubstr("method FP8"), HasSubstr("stored as bf16"), HasSubstr("use method BF16")));
  EXPECT_EQ(mismatch("AMXINT8", int8), "no error");
  EXPECT_EQ(mismatch("MOE_INT8", int8), "no error");
  EXPECT_THAT(mismatch("AMXINT4", int8),
              AllOf(HasSubstr(int8), HasSubstr("int8"), HasSubstr("use method AMXINT8")));
  EXPECT_EQ(mismatch("MOE_INT4", int4), "no error");
  EXPECT_THAT(mismatch("LLAMAFILE", int4),
              AllOf(HasSubstr("LLAMAFILE"), HasSubstr(int4), HasSubstr("use method AMXINT4")));
  EXPECT_EQ(stored_method(*open_experts(bf16)).name, "BF16");
  EXPECT_EQ(stored_method(*open_experts(int8)).name, "AMXINT8");
  EXPECT_EQ(stored_method(*open_experts(int4)).name, "AMXINT4");
}

TEST_F(WeightSources, SaysWhatIsRounded) {
  const auto bf16 = open_experts(folder_ / "bf16"), int8 = open_experts(converted(8, 1, true));
  const auto rounded = [](const char* method, const ExpertSource& source) {
    return rounded_format(weight_method_named(method), source, 1);
  };
  EXPECT_EQ(rounded("BF16", *bf16), std::nullopt);
  EXPECT_EQ(rounded("AMXINT8", *int8), std::nullopt);
  EXPECT_EQ(rounded("MOE_INT8", *bf16), format_named("int8"));
  EXPECT_EQ(rounded("AMXINT4", *bf16), format_named("int4"));
}

// Rounding while loading gives what conversion to one part gives.
TEST_F(WeightSources, RoundsAsTheConverterDoes) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32}) {
    std::filesystem::remove_all(folder_ / "bf16");
    write_tiny_model({.dtype = dtype}, folder_ / "bf16");
    for (const int bits : {4, 8}) {
      const std::string out = converted(bits, 1, true);
      const auto from = open_experts(folder_ / "bf16"), to = open_experts(out);
      const WeightMethod& method = weight_method_named(bits == 4 ? "AMXINT4" : "AMXINT8");
      EXPECT_EQ(rounded_for(method, *to, 1, out), nullptr);
      const auto rounded = rounded_for(method, *from, 1, folder_ / "bf16");
      ASSERT_NE(rounded, nullptr);
      for (const Projection projection : kProjections) {
        const Matrix have = rounded->at(1, 1, projection)->matrix(),
                     want = to->at(1, 1, projection)->matrix();
        EXPECT_EQ(have.codes, want.codes) << bits;
        EXPECT_EQ(have.scales, want.scales) << bits;
      }
      std::filesystem::remove_all(out);
    }
  }
}

}  // namespace
}  // namespace kt::inline weights
