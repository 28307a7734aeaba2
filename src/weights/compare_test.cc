#include "weights/compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "base/error.h"
#include "base/file.h"
#include "weights/safetensors.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;
using Kind = TensorDifference::Kind;

class Compare : public testing::Test {
 protected:
  Compare() : root_(testing::TempDir() + "kt_compare_" + std::to_string(getpid())) {}
  ~Compare() override { fs::remove_all(root_); }

  // F32 tensor "w" of these values, I8 tensor "codes" of these bytes; and "more" if given.
  std::string write(const std::string& name, const std::vector<float>& w, const std::vector<int8_t>& codes,
                    const std::string& more = "") {
    const std::string folder = root_ + "/" + name;
    fs::create_directories(folder);
    std::vector<TensorSpec> specs = {{"codes", Dtype::kI8, {static_cast<int64_t>(codes.size())}},
                                     {"w", Dtype::kF32, {static_cast<int64_t>(w.size())}}};
    if (!more.empty()) specs.push_back({more, Dtype::kI8, {0}});
    SafetensorsWriter file(folder + "/model.safetensors", specs, {});
    file.write(0, 0, std::as_bytes(std::span(codes)));
    file.write(1, 0, std::as_bytes(std::span(w)));
    file.commit();
    return folder;
  }

  std::string root_;
};

TEST_F(Compare, EqualAndWithinTolerance) {
  const std::string a = write("a", {1, 2, NAN}, {1, 2}), b = write("b", {1, 2.25f, NAN}, {1, 2});
  EXPECT_TRUE(compare_weights(a, a, 0).same());
  const Comparison close = compare_weights(a, b, 0.25);
  EXPECT_TRUE(close.same());
  EXPECT_EQ(close.equal, 2);
  EXPECT_EQ(close.largest, 0.25);
  const Comparison far = compare_weights(a, b, 0.2, 1);
  ASSERT_EQ(far.differences.size(), 1u);
  EXPECT_EQ(far.differences[0].name, "w");
  EXPECT_EQ(far.differences[0].kind, Kind::kValues);
  EXPECT_EQ(far.differences[0].differing, 1);
  EXPECT_EQ(far.differences[0].elements, 3);
}

TEST_F(Compare, MissingShapesBytesAndNumbersAgainstNan) {
  const std::string a = write("a", {1, 2, 3}, {1, 2, 3}, "only_a"),
                    b = write("b", {1, NAN, 3}, {1, 2, 4}, "z");
  const Comparison found = compare_weights(a, b, 100);
  ASSERT_EQ(found.differences.size(), 4u);
  EXPECT_EQ(found.differences[0].name, "codes");  // the tolerance is for floats
  EXPECT_EQ(found.differences[0].differing, 1);
  EXPECT_FALSE(found.differences[0].floats);
  EXPECT_TRUE(found.differences[2].floats);
  EXPECT_EQ(found.differences[1].kind, Kind::kOnlyA);
  EXPECT_EQ(found.differences[1].name, "only_a");
  EXPECT_TRUE(std::isinf(found.differences[2].largest));
  EXPECT_EQ(found.differences[3].kind, Kind::kOnlyB);
  const Comparison shapes = compare_weights(a, write("c", {1, 2}, {1, 2, 3}, "only_a"), 0);
  ASSERT_EQ(shapes.differences.size(), 1u);
  EXPECT_EQ(shapes.differences[0].kind, Kind::kShape);
  EXPECT_EQ(shapes.differences[0].a, "F32 [3]");
  EXPECT_EQ(shapes.differences[0].b, "F32 [2]");
}

TEST_F(Compare, FoldersOfKtFiles) {
  for (const char* side : {"a", "b"}) {
    const std::string folder = text("{}/{}/_layer_0/_numa_0", root_, side);
    fs::create_directories(folder);
    write_atomically(folder + "/INT4_up_0_4Byte_quant_.kt", std::string_view("abcd"));
    const float scale = side[0] == 'a' ? 1.0f : 1.5f;
    write_atomically(folder + "/INT4_up_0_4Byte_scale_.kt", std::as_bytes(std::span(&scale, 1)));
  }
  EXPECT_TRUE(compare_weights(root_ + "/a", root_ + "/a", 0).same());
  const Comparison found = compare_weights(root_ + "/a", root_ + "/b", 0.1);
  ASSERT_EQ(found.differences.size(), 1u);
  EXPECT_EQ(found.differences[0].name, "_layer_0/_numa_0/INT4_up_0_4Byte_scale_.kt");
  EXPECT_EQ(found.differences[0].largest, 0.5);
  EXPECT_THROW(compare_weights(root_ + "/a", write("c", {1}, {1}), 0), Error);
  EXPECT_THROW(compare_weights(root_ + "/a", root_ + "/b", -1), Error);
  EXPECT_THROW(compare_weights(root_ + "/nowhere", root_ + "/nothing", 0), Error);
}

}  // namespace
}  // namespace kt::inline weights
