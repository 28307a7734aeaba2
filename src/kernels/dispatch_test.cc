#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/cpu.h"
#include "kernels/plan.h"
#include "kernels/testing/matrices.h"
#include "kernels/testing/tables.h"

namespace kt::inline kernels {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::StrEq;

bool builds(std::string_view name) {
  for (const IsaStatus& isa : isas())
    if (name == isa.table->name) return true;
  return false;
}

TEST(Dispatch, UnknownNamesListTheKnown) {
  const std::string error = error_of([] { kernels_named("sse9"); });
  EXPECT_THAT(error, HasSubstr("'sse9'"));
  for (const IsaStatus& isa : isas()) EXPECT_THAT(error, HasSubstr(isa.table->name));
}

TEST(Dispatch, AnIsaThisCpuLacksNamesTheFeature) {
  for (const IsaStatus& isa : isas()) {
    if (!isa.missing) {
      EXPECT_EQ(&kernels_named(isa.table->name), isa.table);
      continue;
    }
    EXPECT_THAT(error_of([&] { kernels_named(isa.table->name); }),
                AllOf(HasSubstr(isa.table->name), HasSubstr(isa.missing)));
  }
}

TEST(Dispatch, AnIsaThatWasLeftOutIsSaidToBe) {
  for (const KnownIsa& isa : known_isas()) {
    if (isa.table) {
      EXPECT_STREQ(isa.table->name, isa.name);
      continue;
    }
    EXPECT_FALSE(builds(isa.name));
    const std::string error = error_of([&] { kernels_named(isa.name); });
    EXPECT_THAT(error, HasSubstr(isa.missing ? isa.missing : "left out of this build, which holds portable"));
  }
}

TEST(Dispatch, CompatibleNames) {
  struct {
    const char *theirs, *ours;
  } names[] = {{"avx512_base", "avx512"}, {"avx512_vbmi", "avx512_vnni"}};
  for (const auto& name : names) {
    const std::string error = error_of([&] { EXPECT_STREQ(kernels_named(name.theirs).name, name.ours); });
    if (builds(name.ours))
      EXPECT_THAT(error, AnyOf(StrEq("no error"), HasSubstr("which this CPU does not offer")));
    else
      EXPECT_THAT(error, AnyOf(HasSubstr("unknown ISA"), HasSubstr("left out of this build"),
                               HasSubstr("which this CPU does not offer")));
  }
}

TEST(Dispatch, TheBestIsTheLastThatRuns) {
  if (std::getenv("KT_ISA") || std::getenv("KT_KERNEL_CPU_VARIANT")) return;
  const Kernels* best = nullptr;
  for (const IsaStatus& isa : isas())
    if (!isa.missing) best = isa.table;
  EXPECT_EQ(&best_kernels(), best);
  EXPECT_STREQ(isas()[0].table->name, "portable");
  EXPECT_EQ(isas()[0].missing, nullptr);
}

TEST(Dispatch, TablesAreComplete) {
  for (const IsaStatus& isa : isas()) {
    const Kernels& t = *isa.table;
    EXPECT_EQ(t.fragment, isas()[0].table->fragment)
        << t.name << ": one packing serves all tables of a CPU family";
    EXPECT_EQ(kManyRows % t.tile_rows, 0) << t.name;
    EXPECT_EQ(t.tile_rows % t.many_side, 0) << t.name;
    for (int i = 0; i < kLayoutCount; ++i) {
      EXPECT_TRUE(t.few(i) && t.many_f32[i]) << t.name << " " << i;
      EXPECT_EQ(t.many_s8[i] || t.many_spans[i], is_integer(kLayouts[i].code)) << t.name << " " << i;
      EXPECT_EQ(t.many_bf16[i] != nullptr, t.float_many == ActCode::kBf16) << t.name << " " << i;
    }
  }
}

TEST(Plan, FollowsRowsAndPrecision) {
  const Kernels& t = *tables_under_test()[0];
  const auto route = [&](const char* format, Precision precision, int m) {
    return std::string(name_of(
        plan_for(t, packing_for(format_named(format), 64, 1024, t.fragment, "w"), precision, m).route));
  };
  EXPECT_EQ(route("int8", Precision::kDefault, 1), "few");
  EXPECT_EQ(route("int8", Precision::kInt8, t.few_limit + 1), t.many_spans[0] ? "many_spans" : "many_s8");
  EXPECT_EQ(route("int8", Precision::kF32, 1), "many_f32");
  EXPECT_EQ(route("int8", Precision::kBf16, 1), t.many_bf16[0] ? "many_bf16" : "many_f32");
  EXPECT_EQ(route("bf16", Precision::kInt8, 1), "few");
  EXPECT_EQ(route("bf16", Precision::kF32, 1), "many_f32");
  const Plan plan =
      plan_for(t, packing_for(format_named("q4_k"), 64, 1024, t.fragment, "w"), Precision::kDefault, 3);
  EXPECT_THAT(plan.describe(), AllOf(HasSubstr("few"), HasSubstr("s8"), HasSubstr("16")));
}

// What a tile unit takes for many rows: bytes and far codes where codes are small, else bf16; plain bytes on request.
TEST(Plan, OfATileUnit) {
  for (const Kernels* t : tables_under_test()) {
    if (t->many_spans[0]) continue;
    const auto plan = [&](const char* format, Precision precision) {
      return plan_for(*t, packing_for(format_named(format), 64, 1024, t->fragment, "w"), precision,
                      t->few_limit + 1);
    };
    EXPECT_THAT(plan("int4", Precision::kDefault).describe(),
                AllOf(HasSubstr("many_s8"), HasSubstr("far codes")));
    EXPECT_FALSE(plan("int4", Precision::kInt8).acts.far);
    EXPECT_THAT(plan("q4_k", Precision::kDefault).describe(),
                AllOf(HasSubstr("many_s8"), HasSubstr("every 1024"), HasSubstr("far codes")));
    for (const char* format : {"q8_0", "iq4_nl"})
      EXPECT_EQ(plan(format, Precision::kDefault).route, Route::kManyBf16);
    EXPECT_EQ(plan("q4_k", Precision::kBf16).route, Route::kManyBf16);
    EXPECT_THAT(plan("q4_k", Precision::kInt8).describe(),
                AllOf(HasSubstr("many_s8"), HasSubstr("every 512")));
    EXPECT_EQ(plan("q4_k", Precision::kF32).route, Route::kManyF32);
  }
}

TEST(Plan, NamesPrecisions) {
  EXPECT_EQ(precision_named("int8"), Precision::kInt8);
  EXPECT_EQ(precision_named("default"), Precision::kDefault);
  EXPECT_THAT(error_of([] { precision_named("fp9"); }), AllOf(HasSubstr("'fp9'"), HasSubstr("bf16")));
}

}  // namespace
}  // namespace kt::inline kernels
