#include "weights/plans/plan_parts.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/checked.h"
#include "base/error.h"
#include "base/log.h"
#include "formats/floats.h"
#include "text/shown.h"
#include "weights/gguf/gguf_config.h"
#include "weights/gguf/gguf_names.h"
#include "weights/linears.h"
#include "weights/plans/ignore_list.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;

// Large enough that a piece costs more than claiming it, small enough that progress moves.
constexpr size_t kCopyBytes = 32u << 20;
constexpr int64_t kFloatsAtOnce = 1 << 20;

bool ends_with(std::string_view name, std::initializer_list<std::string_view> endings) {
  return std::any_of(endings.begin(), endings.end(),
                     [name](std::string_view ending) { return name.ends_with(ending); });
}

bool is_copied_file(const std::string& name) {
  if (name.starts_with(".") || name == "config.json" || name == "kt_manifest.json" ||
      name == "kt_calibration.json" || name == "kt_calibration.svg")
    return false;
  return !ends_with(name, {".safetensors", ".safetensors.index.json", ".bin.index.json", ".gguf", ".bin",
                           ".pt", ".pth", ".kt", ".h5", ".msgpack", ".onnx", ".part", ".tmp"});
}

}  // namespace

std::string shard_name(size_t number, size_t total) {
  const auto five = [](size_t value) {
    const std::string digits = std::to_string(value);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  };
  return text("model-{}-of-{}.safetensors", five(number), five(total));
}

void add_copy(ShardPlan& shard, const Tensor& tensor) {
  if (tensor.dtype == Dtype::kGguf)
    fail("{}: {} cannot be copied into a safetensors file", tensor.name, describe(tensor));
  const size_t index = shard.tensors.size();
  shard.tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
  for (size_t at = 0; at < tensor.bytes.size(); at += kCopyBytes) {
    const auto bytes = tensor.bytes.subspan(at, std::min(kCopyBytes, tensor.bytes.size() - at));
    shard.pieces.push_back(
        {.source_bytes = bytes.size(), .run = [index, at, bytes](ShardOutput& out, Scratch&, PieceReport&) {
           out.write(index, at, bytes);
         }});
  }
}

int64_t rows_at_once(int64_t k) { return std::max<int64_t>(1, kFloatsAtOnce / std::max<int64_t>(k, 1)); }

void narrow(std::span<const float> values, Dtype type, std::byte* out) {
  if (type == Dtype::kF32) {
    if (!values.empty()) std::memcpy(out, values.data(), values.size_bytes());
    return;
  }
  KT_CHECK(type == Dtype::kBf16 || type == Dtype::kF16, "narrow to {}", name_of(type));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = type == Dtype::kBf16 ? to_bf16(values[i]).bits : to_f16(values[i]).bits;
    std::memcpy(out + 2 * i, &bits, 2);
  }
}

void write_floats(const StoredMatrix& matrix, Dtype type, size_t tensor, ShardOutput& out, Scratch& scratch) {
  write_floats_at(matrix, type, tensor, 0, out, scratch);
}

void write_floats_at(const StoredMatrix& matrix, Dtype type, size_t tensor, uint64_t offset, ShardOutput& out,
                     Scratch& scratch) {
  const int64_t step = std::min(rows_at_once(matrix.k), matrix.n);
  const auto width = static_cast<size_t>(dtype_bits(type)) / 8;
  scratch.values.resize(static_cast<size_t>(step * matrix.k));
  scratch.packed.resize(scratch.values.size() * width);
  for (int64_t first = 0; first < matrix.n; first += step) {
    const int64_t rows = std::min(step, matrix.n - first);
    const auto count = static_cast<size_t>(rows * matrix.k);
    matrix.values(first, rows, scratch.values.data());
    narrow({scratch.values.data(), count}, type, scratch.packed.data());
    out.write(tensor, offset + static_cast<uint64_t>(first * matrix.k) * width,
              std::span(scratch.packed).first(count * width));
  }
}

void add_floats(ShardPlan& shard, std::string name, Dtype type, const StoredMatrix& shape,
                uint64_t source_bytes, MatrixOpener open) {
  checked_mul(checked_mul(shape.n, shape.k, name), int64_t{4}, name);
  const size_t index = shard.tensors.size();
  shard.tensors.push_back({std::move(name), type, {shape.n, shape.k}});
  const auto block = static_cast<uint64_t>(std::min(rows_at_once(shape.k), shape.n) * shape.k);
  shard.pieces.push_back(
      {.source_bytes = source_bytes,
       .scratch_bytes = block * 16,  // f32, narrow, and what values() unpacks for itself
       .run = [index, type, open = std::move(open)](ShardOutput& out, Scratch& scratch, PieceReport&) {
         write_floats(*open(), type, index, out, scratch);
       }});
}

Dtype kept_type(const StoredMatrix& matrix) {
  if (matrix.format.scale != Scale::kNone) return Dtype::kBf16;
  if (matrix.format.code == Code::kF32) return Dtype::kF32;
  return matrix.format.code == Code::kF16 ? Dtype::kF16 : Dtype::kBf16;
}

void check_published_names(const Checkpoint& checkpoint) {
  if (!checkpoint.is_gguf()) return;
  // Decays as rates, norms with their one added, heads in another order: names are known, numbers are others.
  const auto recurrent = [](const Tensor& tensor) { return tensor.name.find(".ssm_") != tensor.name.npos; };
  const auto found = std::ranges::find_if(checkpoint.tensors(), recurrent);
  if (found != checkpoint.tensors().end())
    fail_as(ErrorKind::kUnsupported,
            "{}: recurrent layers ({}) are stored in another form than in a published checkpoint and are not "
            "turned "
            "back; convert the published one",
            checkpoint.path(), shown(found->name));
  if (checkpoint.gguf_family() != nullptr) return;
  const std::string_view architecture = gguf_string(checkpoint.gguf(), "general.architecture");
  fail_as(ErrorKind::kUnsupported,
          "{}: the names that a published checkpoint of architecture {} has are not known; known: {}",
          checkpoint.path(), architecture.empty() ? "(none)" : shown(architecture),
          gguf_architectures(checkpoint.known_families()));
}

bool is_extra_layer(const Checkpoint& checkpoint, std::string_view published) {
  const int layers = checkpoint.config().layers;
  return checkpoint.is_gguf() && layers > 0 && layer_of(published) >= layers;
}

void add_gguf_rest(ShardPlan& shard, const Checkpoint& checkpoint, FunctionRef<bool(const Tensor&)> taken) {
  std::vector<std::string> left_out;
  for (const Tensor& tensor : checkpoint.tensors()) {
    if (taken(tensor) || is_gguf_config_tensor(tensor.name)) continue;
    const auto name = published_name(checkpoint.gguf_family(), tensor.name);
    if (!name || is_extra_layer(checkpoint, *name)) {
      left_out.push_back(tensor.name);
      continue;
    }
    const size_t index = shard.tensors.size();
    shard.tensors.push_back({*name, Dtype::kF32, tensor.shape});
    shard.pieces.push_back(
        {.source_bytes = tensor.bytes.size(),
         .scratch_bytes = tensor.bytes.size() * 4,
         .run = [&checkpoint, name = *name, index](ShardOutput& out, Scratch&, PieceReport&) {
           const std::vector<float> values = read_vector(checkpoint, name);
           out.write(index, 0, std::as_bytes(std::span(values)));
         }});
  }
  if (!left_out.empty())
    KT_LOG(LogLevel::kWarning, "{}: {} tensors are not written, the published model has none like them: {}",
           checkpoint.path(), left_out.size(), shown_list(left_out, 8));
}

std::vector<SideFile> side_files(const std::string& folder) {
  std::vector<SideFile> files;
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, code)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_regular_file(code) && is_copied_file(name))
      files.push_back({name, "", entry.path().string()});
  }
  if (code) fail("{}: {}", folder, code.message());
  std::sort(files.begin(), files.end(), [](const SideFile& a, const SideFile& b) { return a.name < b.name; });
  return files;
}

Json source_settings(const Checkpoint& checkpoint) {
  Json files = Json::object();
  for (const std::string& path : checkpoint.files()) {
    std::error_code code;
    const auto size = fs::file_size(path, code);
    files[fs::path(path).filename().string()] = code ? 0 : static_cast<uint64_t>(size);
  }
  return files;
}

Json config_without_quantization(const Json& config) {
  Json out = config.is_object() ? config : Json::object();
  for (const char* key : {"quantization_config", "compression_config"}) out.erase(key);
  for (const char* key : {"text_config", "language_config", "llm_config", "thinker_config"})
    if (const auto nested = out.find(key); nested != out.end() && nested->is_object())
      *nested = config_without_quantization(*nested);
  return out;
}

}  // namespace kt::inline weights
