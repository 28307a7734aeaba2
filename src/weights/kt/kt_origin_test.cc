#include "weights/kt/kt_origin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "weights/kt/kt_arrays.h"
#include "weights/kt/kt_plan.h"
#include "weights/stored_names.h"
#include "weights/testing/tiny_model.h"

namespace kt::inline weights {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

void convert_tiny(const std::string& from, const std::string& to, bool merge) {
  const Checkpoint checkpoint(from);
  const auto source = open_experts(checkpoint);
  run_tiny_plan(plan_kt_weights(checkpoint, *source, {.output = to, .merge = merge, .tool = "t"}));
}

// in/ and its experts in tree/out/.
class KtOrigin : public ::testing::Test {
 protected:
  KtOrigin() {
    write_tiny_model({}, folder_ / "in");
    convert_tiny(folder_ / "in", out_, false);
  }
  Json facts() const { return read_json(out_ + "/kt_weights.json"); }
  void write_facts(const Json& facts) const { write_atomically(out_ + "/kt_weights.json", facts.dump()); }

  const TemporaryFolder folder_;
  const std::string out_ = folder_ / "tree/out", in_ = folder_ / "in";
};

TEST_F(KtOrigin, AMergedOutputIsAModelByItself) {
  convert_tiny(in_, folder_ / "merged", true);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "merged/kt_weights.json"));
  std::filesystem::remove_all(in_);
  const ModelParts parts = open_model_parts(folder_ / "merged");
  EXPECT_EQ(parts.experts, "");
  EXPECT_TRUE(parts.checkpoint->has_kt_experts());
  EXPECT_EQ(stored_name(*parts.checkpoint, "model.layers.1.input_layernorm.weight"),
            "blk.1.input_layernorm.weight");
  EXPECT_TRUE(parts.checkpoint->find(stored_name(*parts.checkpoint, "model.embed_tokens.weight")));
  EXPECT_EQ(open_own_experts(*parts.checkpoint)->dialect(), "kt-int4");
  // What is made of it again would be rounded twice.
  EXPECT_THAT(error_of([&] { open_experts(*parts.checkpoint); }),
              HasSubstr("was converted for the CPU already"));
}

TEST_F(KtOrigin, ExpertsAloneOpenTheirModel) {
  const ModelParts parts = open_model_parts(out_);
  EXPECT_EQ(parts.experts, out_);
  EXPECT_EQ(parts.checkpoint->path(), in_);
  EXPECT_FALSE(parts.checkpoint->has_kt_experts());
}

TEST_F(KtOrigin, IsFoundBesideItsExperts) {
  const TemporaryFolder other;
  std::filesystem::rename(in_, other / "in");
  std::filesystem::rename(out_, other / "out");
  EXPECT_EQ(open_model_parts(other / "out").checkpoint->path(), other / "in");
  write_tiny_model({.experts = 3}, other / "in");  // another one of that name
  EXPECT_THAT(error_of([&] { open_model_parts(other / "out"); }), HasSubstr("has changed"));
}

TEST_F(KtOrigin, OneThatIsGoneIsNamed) {
  std::filesystem::rename(in_, folder_ / "elsewhere");
  EXPECT_EQ(error_of([&] { open_model_parts(out_); }),
            out_ + ": holds converted experts only, and the model they were made from, " + in_ +
                ", is not there; give the model, and `weights` " + out_ + ", to run them together");
}

TEST_F(KtOrigin, OneThatChangedIsNamedWithWhatDid) {
  const std::string weights = in_ + "/model.safetensors";
  {
    std::fstream file(weights, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('\x55');
  }
  EXPECT_THAT(error_of([&] { open_model_parts(out_); }),
              AllOf(HasSubstr(out_), HasSubstr(in_ + ", has changed: model.safetensors holds something else"),
                    HasSubstr("`weights`"), Not(HasSubstr("\n"))));
  write_tiny_model({.experts = 3}, in_);
  EXPECT_THAT(error_of([&] { open_model_parts(out_); }),
              HasSubstr("model.safetensors is not the file that it was"));
}

TEST_F(KtOrigin, OutputsThatNameNoneAreToldFromTheRest) {
  Json old = facts();
  old.erase("origin");
  write_facts(old);
  const std::string error = error_of([&] { open_model_parts(out_); });
  EXPECT_THAT(
      error, AllOf(HasSubstr("does not name the model they were made from"), HasSubstr("`weights` " + out_)));
  std::filesystem::remove(out_ + "/kt_weights.json");
  EXPECT_EQ(error_of([&] { open_model_parts(out_); }), error);
  old["origin"] = 7;
  write_facts(old);
  EXPECT_THAT(error_of([&] { open_model_parts(out_); }), HasSubstr("\"origin\" is not an object"));
  old["origin"] = {{"path", in_}, {"files", 3}, {"contents", "x"}};
  write_facts(old);
  EXPECT_THAT(error_of([&] { open_model_parts(out_); }), HasSubstr("has changed: "));
  old["origin"] = {{"path", in_}};
  write_facts(old);
  EXPECT_THAT(error_of([&] { open_model_parts(out_); }),
              HasSubstr("has changed: 1 files where there were 0"));
}

// Merging passes on whose experts they are; with the model itself the result needs no other.
TEST_F(KtOrigin, MergingPassesItOn) {
  run_tiny_plan(plan_merge({.folder = out_, .output = folder_ / "merged", .tool = "t"}));
  const ModelParts parts = open_model_parts(folder_ / "merged");
  EXPECT_EQ(parts.experts, folder_ / "merged");
  EXPECT_EQ(parts.checkpoint->path(), in_);
  EXPECT_EQ(kt_origin_in(folder_ / "merged"), kt_origin_in(out_));
  run_tiny_plan(plan_merge({.folder = out_, .original = in_, .output = folder_ / "whole", .tool = "t"}));
  EXPECT_EQ(open_model_parts(folder_ / "whole").experts, "");
}

}  // namespace
}  // namespace kt::inline weights
