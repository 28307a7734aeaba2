#include "cli/quant/conversion_report.h"

#include <gtest/gtest.h>

namespace kt::inline cli {
namespace {

TEST(ConversionReport, AnEtaOnlyOnceSomethingWasMeasured) {
  ConversionProgress at{.source_bytes = 0, .source_total = 4000000000, .shards = 4};
  EXPECT_EQ(progress_text(at), "0.0%  0 of 4 files");
  at.seconds = 20;
  EXPECT_EQ(progress_text(at).find("ETA"), std::string::npos);
  at.seconds = 0.2;
  at.source_bytes = 100;  // says nothing about the rest
  EXPECT_EQ(progress_text(at).find("ETA"), std::string::npos);
  at = {.source_bytes = 1000000000, .source_total = 4000000000, .shards_done = 1, .shards = 4, .seconds = 50};
  EXPECT_NE(progress_text(at).find("1 of 4 files  0.02 GB/s  ETA 2m30s"), std::string::npos)
      << progress_text(at);
  EXPECT_EQ(progress_text({.checked_bytes = 1 << 20, .check_total = 4 << 20}),
            "reading finished files again: 1.0 MiB of 4.0 MiB");
}

}  // namespace
}  // namespace kt::inline cli
