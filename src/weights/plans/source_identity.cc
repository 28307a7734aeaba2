#include "weights/plans/source_identity.h"

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/mapped_faults.h"
#include "base/sha256.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;
constexpr uint64_t kEnds = 64u << 10, kPiece = 4096, kSpread = 64;

// The same on every machine and in every build, which std::hash is not.
uint64_t number_of(std::string_view name) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash ^ hash >> 32;
}

// "...experts.17...": one of many, which nearly always change together.
bool of_one_expert(std::string_view name) {
  constexpr std::string_view kExperts = "experts.";
  const size_t at = name.find(kExperts);
  return at != std::string_view::npos && at + kExperts.size() < name.size() &&
         name[at + kExperts.size()] >= '0' && name[at + kExperts.size()] <= '9';
}

struct Stretch {
  uint64_t at = 0, count = 0;
};

class FileSamples {
 public:
  explicit FileSamples(std::span<const std::byte> file) : file_(file) {}

  // 4 KiB around its middle; where it is not looked into, only where it begins.
  void add(const Tensor& tensor, bool look) {
    if (tensor.bytes.empty()) return;
    const auto start = static_cast<uint64_t>(tensor.bytes.data() - file_.data()), size = tensor.bytes.size();
    first_ = std::min(first_, start);
    if (look) add(start + (size > kPiece ? (size - kPiece) / 2 : 0), std::min<uint64_t>(size, kPiece));
  }

  std::string digest() {
    const uint64_t size = file_.size(), data = std::min(first_, size);
    add(0, data);
    add(data, kEnds);
    add(size - std::min(size - data, kEnds), kEnds);
    for (uint64_t i = 0; i < kSpread && size - data > kPiece; ++i)
      add(data + (size - data - kPiece) / (kSpread - 1) * i, kPiece);
    // In the order they lie in, and asked for together: the disk does the rest.
    std::ranges::sort(pieces_, {}, [](const Stretch& piece) { return std::pair(piece.at, piece.count); });
    for (const Stretch& piece : pieces_) will_need(file_.subspan(piece.at, piece.count));
    Sha256 sum;
    for (const Stretch& piece : pieces_) {
      const uint64_t place[] = {piece.at, piece.count};
      sum.add(std::as_bytes(std::span(place)));
      sum.add(file_.subspan(piece.at, piece.count));
    }
    return sum.hex();
  }

 private:
  void add(uint64_t at, uint64_t count) {
    at = std::min<uint64_t>(at, file_.size());
    pieces_.push_back({at, std::min<uint64_t>(count, file_.size() - at)});
  }

  std::span<const std::byte> file_;
  uint64_t first_ = UINT64_MAX;
  std::vector<Stretch> pieces_;
};

std::string whole_digest(std::span<const std::byte> bytes) {
  Sha256 sum;
  sum.add(bytes);
  return sum.hex();
}

std::string sampled_digest(const Checkpoint& checkpoint, const MappedFile& file, uint64_t step) {
  const std::vector<Tensor> tensors = checkpoint.is_gguf()
                                          ? parse_gguf(file.bytes(), file.path()).tensors
                                          : parse_safetensors(file.bytes(), file.path()).tensors;
  FileSamples samples(file.bytes());
  for (const Tensor& tensor : tensors)
    samples.add(tensor, !of_one_expert(tensor.name) || number_of(tensor.name) % step == 0);
  return samples.digest();
}

}  // namespace

Json source_contents(const Checkpoint& checkpoint, const IdentitySampling& sampling) {
  uint64_t total = 0, many = 0;
  std::vector<MappedFile> files;
  for (const std::string& path : checkpoint.files()) total += files.emplace_back(path).size();
  for (const Tensor& tensor : checkpoint.tensors()) many += of_one_expert(tensor.name) ? 1 : 0;
  const uint64_t step = std::max<uint64_t>(1, many / std::max<uint64_t>(1, sampling.expert_tensors));
  Json out = Json::object();
  for (const MappedFile& file : files)
    out[fs::path(file.path()).filename().string()] =
        total > sampling.whole ? sampled_digest(checkpoint, file, step) : whole_digest(file.bytes());
  check_mapped_files();
  // A GGUF file has its configuration in itself; what lies beside it may belong to anything.
  if (!checkpoint.is_gguf()) out["config.json"] = file_digest(checkpoint.folder() + "/config.json");
  return out;
}

std::string file_digest(const std::string& path) {
  std::error_code code;
  if (!fs::exists(path, code)) return "absent";
  return whole_digest(MappedFile(path).bytes());
}

}  // namespace kt::inline weights
