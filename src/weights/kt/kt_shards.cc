#include "weights/kt/kt_shards.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <system_error>

#include "base/error.h"
#include "weights/kt/kt_names.h"

namespace kt::inline weights {
namespace {

constexpr size_t kCopyBytes = size_t{64} << 20;

std::string five_digits(size_t number) {
  std::string digits = text("{}", number);
  return digits.size() < 5 ? std::string(5 - digits.size(), '0') + digits : digits;
}

void add_copies(const Tensor& tensor, size_t index, ShardPlan& shard) {
  for (size_t at = 0; at < tensor.bytes.size(); at += kCopyBytes) {
    const auto bytes = tensor.bytes.subspan(at, std::min(kCopyBytes, tensor.bytes.size() - at));
    shard.pieces.push_back({.source_bytes = bytes.size(),
                            .scratch_bytes = 0,
                            .run = [index, at, bytes](ShardOutput& out, Scratch&, PieceReport&) {
                              out.write(index, at, bytes);
                            }});
  }
}

}  // namespace

std::string shard_file_name(size_t number, size_t total) {
  return text("model-{}-of-{}.safetensors", five_digits(number), five_digits(total));
}

ShardPlan other_tensors(const Checkpoint& checkpoint, const ExpertSource& source) {
  ShardPlan shard;
  if (checkpoint.is_gguf()) return shard;
  std::map<std::string, std::string> taken;  // new name -> old
  for (const Tensor& tensor : checkpoint.tensors()) {
    if (source.owns(tensor.name)) continue;
    std::string name = kt_other_name(tensor.name);
    const auto [known, fresh] = taken.emplace(name, tensor.name);
    if (!fresh)
      fail("{}: {} and {} would both be called {}", checkpoint.path(), known->second, tensor.name, name);
    add_copies(tensor, shard.tensors.size(), shard);
    shard.tensors.push_back({.name = std::move(name), .dtype = tensor.dtype, .shape = tensor.shape});
  }
  return shard;
}

Json source_files(const Checkpoint& checkpoint) {
  namespace fs = std::filesystem;
  Json out = Json::array();
  for (const std::string& file : checkpoint.files()) {
    std::error_code error;
    const uintmax_t size = fs::file_size(file, error);
    if (error) fail("{}: {}", file, error.message());
    out.push_back({{"file", fs::path(file).filename().string()}, {"bytes", size}});
  }
  return out;
}

void name_shards(ConversionPlan& plan) {
  for (size_t i = 0; i < plan.shards.size(); ++i)
    plan.shards[i].file = shard_file_name(i + 1, plan.shards.size());
}

}  // namespace kt::inline weights
