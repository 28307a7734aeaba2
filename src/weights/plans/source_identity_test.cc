#include "weights/plans/source_identity.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "weights/testing/files.h"

namespace kt::inline weights {
namespace {

using testing_files::TempFolder;

constexpr int64_t kBig = 1 << 20, kSmall = 100;
constexpr IdentitySampling kSampled{.whole = 0};

// Eight experts of 1 MiB each and a router of 100 bytes.
void write_model(const std::string& folder) {
  std::filesystem::create_directories(folder);
  std::vector<TensorSpec> tensors;
  for (int e = 0; e < 8; ++e) tensors.push_back({text("mlp.experts.{}.up_proj", e), Dtype::kU8, {kBig}});
  tensors.push_back({"mlp.gate", Dtype::kU8, {kSmall}});
  SafetensorsWriter writer(folder + "/model.safetensors", tensors, {});
  for (size_t t = 0; t < tensors.size(); ++t) {
    std::vector<std::byte> bytes(byte_count(tensors[t]));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(static_cast<uint8_t>(i * 31 + t));
    writer.write(t, 0, bytes);
  }
  writer.commit();
  std::ofstream(folder + "/config.json") << R"({"rope_theta": 10000})";
}

// One more in a stretch of bytes of a tensor, where it lies.
void change(const std::string& folder, const std::string& tensor, uint64_t first, uint64_t count) {
  const std::string path = folder + "/model.safetensors";
  std::streamoff at = 0;
  {
    const MappedFile file(path);
    for (const Tensor& each : parse_safetensors(file.bytes(), path).tensors)
      if (each.name == tensor) at = each.bytes.data() - file.bytes().data();
  }
  ASSERT_GT(at, 0) << tensor;
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  std::string bytes(count, '\0');
  file.seekg(at + static_cast<std::streamoff>(first));
  file.read(bytes.data(), static_cast<std::streamsize>(count));
  for (char& byte : bytes) ++byte;
  file.seekp(at + static_cast<std::streamoff>(first));
  file.write(bytes.data(), static_cast<std::streamsize>(count));
}

Json contents_seen(const std::string& folder, const IdentitySampling& sampling) {
  return source_contents(Checkpoint(folder), sampling);
}

TEST(SourceIdentity, ACopyIsTheSameAndAnyByteOfASmallModelCounts) {
  const TempFolder folder;
  write_model(folder.at("a"));
  std::filesystem::copy(folder.at("a"), folder.at("b"));
  std::filesystem::last_write_time(folder.at("b/model.safetensors"), std::filesystem::file_time_type::min());
  for (const IdentitySampling& sampling : {IdentitySampling{}, kSampled})
    EXPECT_EQ(contents_seen(folder.at("a"), sampling), contents_seen(folder.at("b"), sampling));
  change(folder.at("b"), "mlp.experts.3.up_proj", 12345, 1);
  EXPECT_NE(contents_seen(folder.at("a"), {}), contents_seen(folder.at("b"), {}));
}

TEST(SourceIdentity, SamplesOfALargeModelSeeEveryTensor) {
  const TempFolder folder;
  write_model(folder.at("model"));
  Json last = contents_seen(folder.at("model"), kSampled);
  for (const char* tensor : {"mlp.experts.0.up_proj", "mlp.experts.5.up_proj", "mlp.experts.7.up_proj"}) {
    change(folder.at("model"), tensor, 0, kBig);
    const Json now = contents_seen(folder.at("model"), kSampled);
    EXPECT_NE(last, now) << tensor;
    last = now;
  }
  change(folder.at("model"), "mlp.gate", kSmall / 2, 1);
  EXPECT_NE(last, contents_seen(folder.at("model"), kSampled));
  // Where experts are many, some stand for all; those changed together are still seen.
  const IdentitySampling few{.whole = 0, .expert_tensors = 1};
  last = contents_seen(folder.at("model"), few);
  for (int e = 0; e < 8; ++e) change(folder.at("model"), text("mlp.experts.{}.up_proj", e), 0, kBig);
  EXPECT_NE(last, contents_seen(folder.at("model"), few));
}

TEST(SourceIdentity, TheConfigurationCounts) {
  const TempFolder folder;
  write_model(folder.at("model"));
  const Json before = contents_seen(folder.at("model"), {});
  folder.put("model/config.json", R"({"rope_theta": 90000})");
  const Json now = contents_seen(folder.at("model"), {});
  EXPECT_NE(before.at("config.json"), now.at("config.json"));
  EXPECT_EQ(before.at("model.safetensors"), now.at("model.safetensors"));
  std::filesystem::remove(folder.at("model/config.json"));
  EXPECT_EQ(file_digest(folder.at("model/config.json")), "absent");
}

}  // namespace
}  // namespace kt::inline weights
