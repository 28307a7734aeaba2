#include "cli/gpu_flags.h"

#include <gmock/gmock.h>

#include "base/testing/error_of.h"
#include "cli/ignored_flags.h"
#include "cli/settings.h"
#include "cli/sglang_flags.h"
#include "cuda/driver.h"

namespace kt::inline cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A verb with the flags, parsed.
struct Parsed {
  CLI::App app{"", "kt"};
  CLI::App* verb = app.add_subcommand("run", "");
  GpuUseFlags flags;

  explicit Parsed(std::vector<std::string> words) {
    flags.add_to(*verb);
    words.insert(words.begin(), "run");
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  }
};

PlacementOptions options_of(std::vector<std::string> words) {
  return Parsed(std::move(words)).flags.placement_options();
}

TEST(GpuUseFlags, SayNothingAtFirst) {
  const Parsed none({});
  EXPECT_EQ(none.flags.device, "auto");
  EXPECT_EQ(none.flags.choice().kind, cuda_absent() ? GpuChoice::Kind::kOff : GpuChoice::Kind::kAuto);
  EXPECT_EQ(Parsed({"--gpu", "auto"}).flags.choice().kind, GpuChoice::Kind::kAuto);
  const PlacementOptions got = none.flags.placement_options();
  EXPECT_EQ(got.gpu_memory, 0u);
  EXPECT_EQ(got.share, 0);
  EXPECT_EQ(got.experts, ExpertWish{});
  EXPECT_FALSE(got.strategy);
  EXPECT_EQ(got.statistics, "");
  EXPECT_EQ(none.flags.given(), "");
}

TEST(GpuUseFlags, AloneAndWithANumber) {
  EXPECT_EQ(Parsed({"--gpu"}).flags.choice().kind, GpuChoice::Kind::kNumber);
  EXPECT_THAT(Parsed({"--gpu"}).flags.choice().numbers, ElementsAre(0));
  EXPECT_THAT(Parsed({"--gpu", "3"}).flags.choice().numbers, ElementsAre(3));
  EXPECT_THAT(Parsed({"--gpu", "1,0,2"}).flags.choice().numbers, ElementsAre(1, 0, 2));
  EXPECT_THAT(Parsed({"--gpu", "0,0"}).flags.choice().numbers, ElementsAre(0, 0));
  EXPECT_EQ(Parsed({"--gpu", "auto"}).flags.choice().kind, GpuChoice::Kind::kAuto);
  EXPECT_EQ(Parsed({"--gpu", "off"}).flags.choice().kind, GpuChoice::Kind::kOff);
}

TEST(GpuUseFlags, HaveSglangsNames) {
  EXPECT_EQ(options_of({"--kt-num-gpu-experts", "32"}).experts, options_of({"--gpu-experts", "32"}).experts);
  EXPECT_EQ(options_of({"--kt-gpu-experts-ratio", "0.25"}).experts,
            options_of({"--gpu-experts", "25%"}).experts);
  EXPECT_EQ(options_of({"--kt-gpu-experts-ratio", "0", "--gpu-experts", "8"}).experts,
            options_of({"--gpu-experts", "0%"}).experts);
  EXPECT_EQ(options_of({"--kt-expert-placement-strategy", "random"}).strategy, ExpertStrategy::kRandom);
  EXPECT_EQ(options_of({"--init-expert-location", "x.pt"}).statistics, "x.pt");
  EXPECT_EQ(options_of({"--mem-fraction-static", "0.85"}).share, 0.85);
  EXPECT_EQ(options_of({"--gpu-memory", "24GiB"}).gpu_memory, uint64_t{24} << 30);
  EXPECT_EQ(Parsed({"--kt-num-gpu-experts", "1", "--gpu-memory", "1G"}).flags.given(),
            "--gpu-memory, --gpu-experts");
}

// Where no GPU is used each of them has a reason for being ignored, under every name.
TEST(GpuUseFlags, AreIgnoredForAReason) {
  const Parsed none({});
  EXPECT_EQ(none.flags.options().size(), 8u);
  for (const CLI::Option* option : none.flags.options())
    for (const std::string& name : option->get_lnames()) EXPECT_NE(reason_to_ignore("--" + name), "") << name;
}

TEST(GpuUseFlags, WhatIsNoValue) {
  const auto problem = [](std::vector<std::string> words) {
    try {
      Parsed parsed(std::move(words));
    } catch (const CLI::ParseError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  for (const char* const value : {"fast", "0,", ",1", "0,,1", "0;1", "-1", "0,auto"})
    EXPECT_EQ(problem({"--gpu", value}),
              text("--gpu: expected the number of a device, or several as 0,1, auto or off, got {}", value));
  EXPECT_EQ(problem({"--gpu-memory", "0"}), "--gpu-memory: expected a size such as 8GiB or 40GB, got '0'");
  EXPECT_THAT(problem({"--gpu-experts", "-1"}), HasSubstr("got '-1'"));
  EXPECT_THAT(problem({"--gpu-experts", "2.5"}), HasSubstr("got '2.5'"));
  for (const char* flag : {"--kt-gpu-experts-ratio", "--mem-fraction-static"})
    for (const char* value : {"1.01", "-0.1", "half", "nan"})
      EXPECT_THAT(problem({flag, value}), HasSubstr(flag));
  EXPECT_THAT(problem({"--mem-fraction-static", "0"}), HasSubstr("--mem-fraction-static"));
  EXPECT_THAT(problem({"--expert-placement", "best"}), HasSubstr("--expert-placement"));
}

TEST(GpuUseFlags, TakeSettingsThatTheCommandLineLeavesOpen) {
  const Settings settings({{"run",
                            {{"gpu", "1"},
                             {"gpu-memory", "2GiB"},
                             {"gpu-experts", "10%"},
                             {"expert-placement", "front-loading"},
                             {"expert-statistics", "counts.json"}}}},
                          "config.yaml");
  Parsed none({});
  none.flags.take(settings, *none.verb);
  EXPECT_THAT(none.flags.choice().numbers, ElementsAre(1));
  const PlacementOptions got = none.flags.placement_options();
  EXPECT_EQ(got.gpu_memory, uint64_t{2} << 30);
  EXPECT_EQ(got.experts, parse_expert_wish("10%", ""));
  EXPECT_EQ(got.strategy, ExpertStrategy::kFrontLoading);
  EXPECT_EQ(got.statistics, "counts.json");
  EXPECT_EQ(none.flags.given(), "");
  Parsed some({"--gpu", "auto", "--mem-fraction-static", "0.5", "--kt-num-gpu-experts", "3"});
  some.flags.take(settings, *some.verb);
  EXPECT_EQ(some.flags.choice().kind, GpuChoice::Kind::kAuto);
  EXPECT_EQ(some.flags.placement_options().gpu_memory, 0u);
  EXPECT_EQ(some.flags.placement_options().experts, parse_expert_wish("3", ""));
}

TEST(GpuSettings, AreCheckedAsTheFlagsAre) {
  for (const auto& [name, value] : {std::pair("run.gpu", "all"),
                                    {"run.gpu-memory", "lots"},
                                    {"run.gpu-experts", "half"},
                                    {"run.expert-placement", "hot"}}) {
    const std::string line = error_of([&] { setting_from_string(setting_named(name), value); });
    EXPECT_THAT(line, HasSubstr(name));
    EXPECT_THAT(line, HasSubstr(value));
  }
}

}  // namespace
}  // namespace kt::inline cli
