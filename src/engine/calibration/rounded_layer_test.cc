#include "engine/calibration/rounded_layer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "weights/testing/files.h"

namespace kt::inline engine {
namespace {

using testing_files::TempFolder;

RoundedMatrices layer_of(int number) {
  RoundedMatrices out;
  out.figures.layer = number;
  out.figures.experts.push_back(
      {.by = RoundedBy::kNotBetter, .tokens = 40, .rtn_error = 2, .error = 2, .gptq_error = 3.5});
  out.figures.experts.push_back({.by = RoundedBy::kNoTokens});
  Matrix matrix(packed_format({.bits = 4, .group = 32, .type = Dtype::kBf16}), 4, 64);
  for (size_t i = 0; i < matrix.codes.size(); ++i) matrix.codes[i] = static_cast<uint8_t>(i % 16);
  out.matrices.emplace("layers.2.up", std::move(matrix));
  return out;
}

TEST(RoundedLayer, FiguresOfBothWaysComeBack) {
  const TempFolder folder;
  save_rounded_layer(folder.at("layer"), layer_of(2), "settings");
  const auto kept = kept_layer(folder.at("layer"), "settings");
  ASSERT_TRUE(kept);
  EXPECT_EQ(kept->figures().layer, 2);
  EXPECT_EQ(kept->figures().experts[0].gptq_error, 3.5);
  EXPECT_EQ(kept->figures().experts[1].gptq_error, std::nullopt);
  EXPECT_EQ(kept_layer(folder.at("layer"), "others"), nullptr);
}

// Any byte: of codes and scales, and of figures in the header.
TEST(RoundedLayer, DamagedBytesAreNotTaken) {
  const TempFolder folder;
  save_rounded_layer(folder.at("layer"), layer_of(2), "settings");
  const auto size = static_cast<int64_t>(std::filesystem::file_size(folder.at("layer")));
  std::string bytes(static_cast<size_t>(size), '\0');
  std::ifstream(folder.at("layer"), std::ios::binary).read(bytes.data(), size);
  const size_t figure = bytes.find("3.5");
  ASSERT_NE(figure, std::string::npos);
  for (const size_t at : {bytes.size() - 1, bytes.size() - 60, figure}) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    folder.put("layer", changed);
    EXPECT_EQ(kept_layer(folder.at("layer"), "settings"), nullptr) << at;
  }
  folder.put("layer", bytes.substr(0, bytes.size() - 8));
  EXPECT_EQ(kept_layer(folder.at("layer"), "settings"), nullptr);
  folder.put("layer", bytes);
  EXPECT_NE(kept_layer(folder.at("layer"), "settings"), nullptr);
}

TEST(Decide, KeepsBothErrorsWhereCalibrationWasNotBetter) {
  const CalibrationDefaults options;
  ExpertFigures figures{.tokens = 1000, .held_out = 100, .signal = 9, .rtn_error = 2, .error = 3};
  EXPECT_FALSE(decide(figures, options, true));
  EXPECT_EQ(figures.by, RoundedBy::kNotBetter);
  EXPECT_EQ(figures.error, 2);
  EXPECT_EQ(figures.gptq_error, 3);
  figures = {.tokens = 1000, .held_out = 100, .signal = 9, .rtn_error = 2, .error = 1};
  EXPECT_TRUE(decide(figures, options, true));
  EXPECT_EQ(figures.gptq_error, 1);
  figures = {.tokens = 3, .held_out = 1, .signal = 9, .rtn_error = 2, .error = 2};
  EXPECT_FALSE(decide(figures, options, false));
  EXPECT_EQ(figures.gptq_error, std::nullopt);
}

}  // namespace
}  // namespace kt::inline engine
