#include "bench/limit_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kt::inline bench {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

LimitFigures figures(double fraction, double best, double p90) {
  LimitFigures f;
  f.limit_seconds = 1e-3;
  f.fraction = fraction;
  f.best_fraction = best;
  f.p90_fraction = p90;
  f.windows = 9;
  return f;
}

TEST(LimitReport, NothingBeatsTheLimit) {
  const LimitFigures busy = figures(0.91, 1.87, 0.5);
  EXPECT_TRUE(above_limit(busy));
  EXPECT_THAT(limit_cells(busy), AllOf(HasSubstr("91.0%"), HasSubstr(">100%"), Not(HasSubstr("187"))));
  EXPECT_THAT(std::string(limit_note()), AllOf(HasSubstr(">100%"), HasSubstr("busy")));
  EXPECT_THAT(limit_cells(figures(1.4, 1.5, 1.3)), Not(HasSubstr("1.4")));
  EXPECT_THAT(remark(figures(1.4, 1.5, 1.3)), HasSubstr("too low"));
}

TEST(LimitReport, AsMuchAsTwoMeasurementsDifferIsShown) {
  const LimitFigures sound = figures(0.98, 1.015, 0.97);
  EXPECT_FALSE(above_limit(sound));
  EXPECT_THAT(limit_cells(sound), AllOf(HasSubstr("98.0%"), HasSubstr("101.5%"), Not(HasSubstr(">"))));
  EXPECT_EQ(remark(sound), "");
}

TEST(LimitReport, CellsStandUnderTheirHeads) {
  EXPECT_EQ(limit_cells(figures(0.91, 1.87, 0.5)).size(), limit_heads().size());
  EXPECT_EQ(limit_cells(figures(0.91, 0.92, 0.5)).size(), limit_heads().size());
}

TEST(LimitReport, JsonKeepsTheFigures) {
  nlohmann::ordered_json out;
  put_limit(out, figures(0.91, 1.87, 0.5));
  EXPECT_EQ(out["fraction_of_limit_best"], 1.87);
}

}  // namespace
}  // namespace kt::inline bench
