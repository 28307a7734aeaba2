#include "engine/calibration/calibration_totals.h"

#include <gtest/gtest.h>

namespace kt::inline engine {
namespace {

Json expert(const char* method, int tokens, double rtn, double error, double damping) {
  return {{"tokens", tokens}, {"held_out", 3},  {"method", method},   {"signal", 10.0},
          {"rtn_error", rtn}, {"error", error}, {"damping", damping}, {"down_damping", damping / 10}};
}

TEST(CalibrationTotals, SumsReasonsAndDamping) {
  const Json report = {{"layers",
                        {{{"layer", 1}, {"experts", {expert("gptq", 100, 4, 1, 0.5)}}},
                         {{"layer", 4},
                          {"experts",
                           {expert("rtn: few tokens", 7, 2, 2, 0), expert("gptq", 50, 2, 1, 5),
                            expert("rtn: few tokens", 0, 0, 0, 0)}}}}}};
  const Json totals = calibration_totals(report, 0.5);
  EXPECT_EQ(totals.at("experts"), 4);
  EXPECT_EQ(totals.at("methods"), (Json{{"gptq", 2}, {"rtn: few tokens", 2}}));
  EXPECT_EQ(totals.at("tokens"), 157);
  EXPECT_EQ(totals.at("held_out"), 12);
  EXPECT_DOUBLE_EQ(totals.at("ratio").get<double>(), 0.5);
  EXPECT_EQ(totals.at("damping_raised"),
            (Json::array({{{"layer", 4}, {"expert", 1}, {"damping", 5.0}, {"down_damping", 0.5}}})));
  EXPECT_EQ(calibration_summary(totals),
            "2 of 4 experts calibrated, 2 rounded to nearest (2 few tokens); damping raised for 1");
}

TEST(CalibrationTotals, MatricesOfEveryTokenAndKeptExperts) {
  Json linear = expert("gptq", 90, 4, 1, 5), nearest = expert("rtn: gptq was not better", 90, 4, 4, 0.5);
  linear["module"] = "layers.0.o_proj";
  nearest["module"] = "layers.0.q_proj";
  const Json layer = {{"layer", 0},
                      {"experts", {expert("gptq", 9, 2, 1, 0.5), expert("kept", 9, 0, 0, 0)}},
                      {"linears", {linear, nearest}}};
  const Json totals = calibration_totals({{"layers", {layer}}}, 0.5), &linears = totals.at("linears");
  EXPECT_EQ(totals.at("experts"), 2);
  EXPECT_EQ(linears.at("linears"), 2);
  EXPECT_DOUBLE_EQ(linears.at("ratio").get<double>(), 0.625);
  EXPECT_EQ(linears.at("damping_raised"),
            (Json::array(
                {{{"layer", 0}, {"module", "layers.0.o_proj"}, {"damping", 5.0}, {"down_damping", 0.5}}})));
  EXPECT_EQ(
      calibration_summary(totals),
      "1 of 2 experts calibrated, 1 left as they were\n"
      "1 of 2 matrices and MLPs of every token calibrated, 1 rounded to nearest (1 gptq was not better); "
      "damping raised for 1");
}

TEST(CalibrationTotals, NothingToReport) {
  const Json totals =
      calibration_totals({{"layers", {{{"layer", 0}, {"experts", {expert("gptq", 9, 0, 0, 0.5)}}}}}}, 0.5);
  EXPECT_EQ(totals.at("ratio"), 1);
  EXPECT_EQ(calibration_summary(totals), "1 of 1 experts calibrated");
}

}  // namespace
}  // namespace kt::inline engine
