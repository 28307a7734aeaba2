// Converted CPU weights as a source of experts: parts are put together again, nothing is re-quantised. Down
// keeps one scale for every part of a row, because that is how it was rounded.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <system_error>

#include "base/error.h"
#include "base/file.h"
#include "formats/floats.h"
#include "weights/experts.h"
#include "weights/kt/kt_arrays.h"
#include "weights/kt/kt_folder.h"
#include "weights/kt/kt_inventory.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;

// Where arrays are. view() returns the bytes, in `buffer` where they had to be read.
class Arrays {
 public:
  virtual ~Arrays() = default;
  // The array's bytes, mapped or in `buffer`.
  virtual std::span<const std::byte> view(const KtName& name, std::vector<std::byte>& buffer) const = 0;
  virtual bool copies() const = 0;  // view() fills the buffer
};

class FolderArrays final : public Arrays {
 public:
  explicit FolderArrays(const std::string& path) : folder_(path) {}
  const KtFolder& folder() const { return folder_; }
  std::span<const std::byte> view(const KtName& name, std::vector<std::byte>& buffer) const override {
    buffer.resize(folder_.bytes(name));
    folder_.read(name, buffer);
    return buffer;
  }
  bool copies() const override { return true; }

 private:
  KtFolder folder_;
};

class MergedArrays final : public Arrays {
 public:
  explicit MergedArrays(const std::string& path) : checkpoint_(path) {}
  const Checkpoint& checkpoint() const { return checkpoint_; }
  std::span<const std::byte> view(const KtName& name, std::vector<std::byte>&) const override {
    const std::span<const std::byte> bytes = checkpoint_.at(kt_tensor_name(name)).bytes;
    will_need(bytes);  // all of it is read next
    return bytes;
  }
  bool copies() const override { return false; }

 private:
  Checkpoint checkpoint_;
};

// One projection; parts are fetched when first read and stay.
class KtMatrix final : public StoredMatrix {
 public:
  KtMatrix(const Arrays& arrays, const KtModel& model, const KtName& first)
      : arrays_(arrays), model_(model), first_(first), shape_(kt_part_shape(model, first)) {
    const bool down = first.projection == Projection::kDown;
    const std::string weight = kt_tensor_name(first);
    name = weight.substr(0, weight.find(".numa."));
    n = down ? model.hidden : model.inter;
    k = down ? model.inter : model.hidden;
    format = format_named(model.bits == 4 ? "int4" : "int8");
    if (down && model.parts > 1) format.span.k = static_cast<int>(shape_.k);
  }

  void read_ahead() const override {
    if (!arrays_.copies()) std::call_once(fetched_, [&] { fetch(); });
  }
  uint64_t held_bytes() const override {
    if (!arrays_.copies()) return 0;
    return static_cast<uint64_t>(n * k) / 8 * static_cast<uint64_t>(model_.bits);
  }

  Matrix rows(int64_t first, int64_t count) const override {
    KT_CHECK(first >= 0 && count >= 1 && first + count <= n, "{}: rows {} + {} of {}", name, first, count, n);
    std::call_once(fetched_, [&] { fetch(); });
    Matrix out(format, count, k);
    if (first_.projection == Projection::kDown) {
      for (int part = 0; part < model_.parts; ++part)
        copy_rows(part, first, count, {.matrix = out, .row = 0, .slice = part});
      return out;
    }
    for (int64_t row = first; row < first + count;) {
      const int64_t part = row / shape_.n;
      const int64_t rows = std::min((part + 1) * shape_.n, first + count) - row;
      copy_rows(static_cast<int>(part), row - part * shape_.n, rows,
                {.matrix = out, .row = row - first, .slice = 0});
      row += rows;
    }
    return out;
  }

 private:
  struct Part {
    std::vector<std::byte> weight_buffer, scale_buffer;
    std::span<const std::byte> weight, scale;
  };
  struct Target {
    Matrix& matrix;
    int64_t row;
    int slice;  // of columns
  };

  void fetch() const {
    std::vector<Part> parts(static_cast<size_t>(model_.parts));
    for (int i = 0; i < model_.parts; ++i) {
      Part& part = parts[static_cast<size_t>(i)];
      KtName array = first_;
      array.part = i;
      part.weight = arrays_.view(array, part.weight_buffer);
      array.scale = true;
      part.scale = arrays_.view(array, part.scale_buffer);
    }
    parts_ = std::move(parts);
  }

  void copy_rows(int index, int64_t first, int64_t count, const Target& to) const {
    const Part& part = parts_[static_cast<size_t>(index)];
    const int64_t slices = spans(to.matrix.format, k);
    kt_unpack_rows(shape_, part.weight, first, count,
                   to.matrix.codes.data() + to.row * k + to.slice * shape_.k, k);
    for (int64_t row = 0; row < count; ++row) {
      float scale;
      std::memcpy(&scale, part.scale.data() + (first + row) * 4, sizeof scale);
      if (model_.bits == 4) scale *= 16;
      if (!is_finite(scale)) {
        KtName array = first_;
        array.part = index;
        array.scale = true;
        fail("{}: row {} is not a finite number", kt_tensor_name(array), first + row);
      }
      std::memcpy(to.matrix.scales.data() + ((to.row + row) * slices + to.slice) * 4, &scale, sizeof scale);
    }
  }

  const Arrays& arrays_;
  const KtModel& model_;
  KtName first_;  // weight of part 0
  KtShape shape_;
  mutable std::once_flag fetched_;
  mutable std::vector<Part> parts_;
};

class KtSource final : public ExpertSource {
 public:
  KtSource(std::unique_ptr<Arrays> arrays, KtInventory inventory)
      : arrays_(std::move(arrays)), inventory_(std::move(inventory)) {}

  std::string_view dialect() const override { return inventory_.model.bits == 4 ? "kt-int4" : "kt-int8"; }
  std::vector<int> layers() const override { return inventory_.layers; }
  int experts() const override { return inventory_.experts; }
  int64_t hidden() const override { return inventory_.model.hidden; }
  int64_t inter() const override { return inventory_.model.inter; }

  std::unique_ptr<StoredMatrix> at(int layer, int expert, Projection projection) const override {
    if (expert < 0 || expert >= inventory_.experts || !std::ranges::binary_search(inventory_.layers, layer))
      fail("no expert {} in layer {}: {} layers of {} experts", expert, layer, inventory_.layers.size(),
           inventory_.experts);
    return std::make_unique<KtMatrix>(*arrays_, inventory_.model,
                                      KtName{.layer = layer, .projection = projection, .expert = expert});
  }

  bool owns(std::string_view tensor) const override { return parse_kt_tensor_name(tensor).has_value(); }

  std::string module_name(int layer, int expert, Projection projection) const override {
    return text("blk.{}.ffn_{}_exps.{}", layer, name_of(projection), expert);
  }

 private:
  std::unique_ptr<Arrays> arrays_;
  KtInventory inventory_;
};

int64_t number_of(std::string_view digits, std::string_view key, std::string_view file) {
  int64_t out = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9' || out > (int64_t{1} << 31)) fail("{}: {} is \"{}\"", file, key, digits);
    out = out * 10 + (c - '0');
  }
  if (out < 1 || out > (int64_t{1} << 31)) fail("{}: {} is \"{}\"", file, key, digits);
  return out;
}

// "N,K" of a padded gate gives both sizes.
void claim_shape(const std::string& key, std::string_view value, std::string_view file, KtClaims& claims,
                 int parts) {
  const size_t comma = value.find(',');
  if (comma == std::string_view::npos) fail("{}: {} is \"{}\", expected \"N,K\"", file, key, value);
  claims.inter = number_of(value.substr(0, comma), key, file) * parts;
  claims.hidden = number_of(value.substr(comma + 1), key, file);
}

KtClaims claims_of(const Metadata& metadata, std::span<const KtEntry> entries, std::string_view file) {
  KtClaims claims;
  const auto find = [&](const std::string& key) {
    const auto found = metadata.find(key);
    return found == metadata.end() ? std::string_view() : std::string_view(found->second);
  };
  if (const std::string_view layout = find("kt.layout"); !layout.empty()) {
    if (layout != "amx-int4" && layout != "amx-int8")
      fail_as(ErrorKind::kUnsupported, "{}: layout \"{}\", this program knows amx-int4 and amx-int8", file,
              layout);
    claims.bits = layout == "amx-int4" ? 4 : 8;
  }
  if (!find("kt.hidden").empty()) claims.hidden = number_of(find("kt.hidden"), "kt.hidden", file);
  if (!find("kt.inter").empty()) claims.inter = number_of(find("kt.inter"), "kt.inter", file);
  int parts = 0;
  for (const KtEntry& entry : entries) parts = std::max(parts, entry.name.part + 1);
  KtName gate = entries.front().name;
  gate.projection = Projection::kGate;
  gate.backward = gate.scale = false;
  gate.part = 0;
  const std::string key = "kt.shape." + kt_tensor_name(gate);
  if (!find(key).empty()) claim_shape(key, find(key), file, claims, parts);
  return claims;
}

KtEntry merged_entry(const Checkpoint& checkpoint, const Tensor& tensor, const KtName& name) {
  const bool right =
      name.scale ? tensor.dtype == Dtype::kF32 : tensor.dtype == Dtype::kI8 || tensor.dtype == Dtype::kU8;
  if (!right || tensor.shape.size() != 1)
    fail("{}: {}: expected {} with one dimension, the file has {}", checkpoint.path(), tensor.name,
         name.scale ? "F32" : "I8", describe(tensor));
  return {name, tensor.bytes.size()};
}

std::unique_ptr<ExpertSource> open_merged(const std::string& path) {
  auto arrays = std::make_unique<MergedArrays>(path);
  const Checkpoint& checkpoint = arrays->checkpoint();
  std::vector<KtEntry> entries;
  int file = 0;
  for (const Tensor& tensor : checkpoint.tensors()) {
    const std::optional<KtName> name = parse_kt_tensor_name(tensor.name);
    if (!name) continue;
    entries.push_back(merged_entry(checkpoint, tensor, *name));
    if (!in_file_order(entries.front().name, *name)) {
      // Claims are read from the file that holds the first array.
      file = tensor.file;
      std::swap(entries.front(), entries.back());
    }
  }
  if (entries.empty() || checkpoint.is_gguf())
    fail_as(ErrorKind::kUnsupported, "{}: no converted experts in it", path);
  std::ranges::sort(entries, in_file_order, &KtEntry::name);
  const KtClaims claims =
      claims_of(checkpoint.metadata(file), entries, checkpoint.files()[static_cast<size_t>(file)]);
  KtInventory inventory = take_inventory(path, entries, claims, checkpoint.config());
  return std::make_unique<KtSource>(std::move(arrays), std::move(inventory));
}

}  // namespace

std::unique_ptr<ExpertSource> open_kt_weights(const std::string& path) {
  if (!has_kt_layers(path)) return open_merged(path);
  auto arrays = std::make_unique<FolderArrays>(path);
  KtInventory inventory = arrays->folder().inventory();
  return std::make_unique<KtSource>(std::move(arrays), std::move(inventory));
}

bool is_kt_weights(const std::string& path) {
  if (has_kt_layers(path)) return true;
  try {
    const Checkpoint checkpoint(path);
    if (checkpoint.is_gguf()) return false;
    return std::ranges::any_of(checkpoint.tensors(), [](const Tensor& tensor) {
      return parse_kt_tensor_name(tensor.name).has_value();
    });
  } catch (const Error&) {
    return false;  // whoever opens it will say why
  }
}

}  // namespace kt::inline weights
