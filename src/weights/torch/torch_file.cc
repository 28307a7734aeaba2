#include "weights/torch/torch_file.h"

#include <algorithm>

#include "base/checked.h"
#include "text/shown.h"
#include "weights/torch/pickle.h"
#include "weights/torch/stored_zip.h"
#include "weights/torch/torch_refusal.h"

namespace kt::inline weights {
namespace {

using Kind = PickleValue::Kind;

constexpr std::string_view kZipMark = "PK\x03\x04";
constexpr size_t kMostPickle = size_t{64} << 20;
constexpr size_t kMostRank = 16;
constexpr std::string_view kUntyped = "torch.storage\nUntypedStorage";

struct TorchType {
  std::string_view global;  // a kind of storage, or a dtype that has none of its own
  Dtype dtype;
};
constexpr TorchType kTypes[] = {
    {"torch\nFloatStorage", Dtype::kF32}, {"torch\nDoubleStorage", Dtype::kF64},
    {"torch\nHalfStorage", Dtype::kF16},  {"torch\nBFloat16Storage", Dtype::kBf16},
    {"torch\nByteStorage", Dtype::kU8},   {"torch\nCharStorage", Dtype::kI8},
    {"torch\nShortStorage", Dtype::kI16}, {"torch\nIntStorage", Dtype::kI32},
    {"torch\nLongStorage", Dtype::kI64},  {"torch\nBoolStorage", Dtype::kBool},
    {"torch\nuint16", Dtype::kU16},       {"torch\nuint32", Dtype::kU32},
    {"torch\nuint64", Dtype::kU64},
};

std::string_view characters_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The archive of one file, and the pickle in it.
class TorchReader {
 public:
  TorchReader(std::span<const std::byte> file, std::string_view name)
      : name_(name), entries_(parse_stored_zip(file, name)) {
    find_folder();
    const std::string_view order =
        characters_of(bytes_of("byteorder").value_or(std::span<const std::byte>()));
    if (!order.empty() && order != "little")
      refuse_torch_file(name_, text("numbers in {} order", shown(order)));
    const std::span<const std::byte> pickle = *bytes_of("data.pkl");
    if (pickle.size() > kMostPickle)
      refuse_torch_file(name_, text("{} around the tensors, at most {} are read", human_bytes(pickle.size()),
                                    human_bytes(kMostPickle)));
    pickle_ = parse_pickle(pickle, name_);
  }

  TorchFile read() const {
    TorchFile out;
    const PickleValue& top = pickle_.top();
    if (top.kind == Kind::kCall) {
      out.alone = tensor(top, 0);
      return out;
    }
    if (top.kind != Kind::kDict) refuse_torch_file(name_, "neither a tensor nor a dict of tensors");
    for (size_t i = 0; i + 1 < top.items.size(); i += 2) {
      const PickleValue &key = at(top.items[i]), &value = at(top.items[i + 1]);
      if (key.kind != Kind::kText) refuse_torch_file(name_, "a dict whose keys are not all texts");
      if (value.kind == Kind::kCall)
        out.tensors.emplace_back(key.text, tensor(value, 0));
      else
        out.others.emplace_back(key.text);
    }
    return out;
  }

 private:
  const PickleValue& at(uint32_t value) const { return pickle_.at(value); }

  // All entries stand in one folder, named after the file that was written.
  void find_folder() {
    for (const ZipEntry& entry : entries_)
      if (entry.name.ends_with("/data.pkl")) {
        if (!folder_.empty()) fail("{}: two entries named data.pkl", name_);
        folder_ = entry.name.substr(0, entry.name.size() - std::string_view("data.pkl").size());
      }
    if (folder_.empty()) fail("{}: a zip archive without data.pkl: not written by torch.save", name_);
  }

  std::optional<std::span<const std::byte>> bytes_of(std::string_view entry) const {
    for (const ZipEntry& each : entries_)
      if (each.name.size() == folder_.size() + entry.size() && each.name.starts_with(folder_) &&
          each.name.ends_with(entry))
        return each.bytes;
    return {};
  }

  // What a call makes: a tensor, or a parameter, which is one with more around it.
  TorchTensor tensor(const PickleValue& call, int depth) const {
    const std::string_view called = at(call.items[0]).text;
    if (called == "torch._utils\n_rebuild_parameter" && call.items.size() > 1 && depth == 0) {
      const PickleValue& inner = at(call.items[1]);
      if (inner.kind == Kind::kCall) return tensor(inner, 1);
    }
    const bool typed = called == "torch._utils\n_rebuild_tensor_v2";
    if (!typed && called != "torch._utils\n_rebuild_tensor_v3")
      refuse_torch_file(name_, text("it calls {}", dotted(called)));
    // storage, offset, shape, strides, requires_grad, hooks; version 3: dtype
    if (call.items.size() < (typed ? 7u : 8u))
      fail("{}: a tensor described by {} values", name_, call.items.size() - 1);
    TorchTensor out;
    out.dtype = open_storage(at(call.items[1]), typed ? nullptr : &at(call.items[7]), out.storage);
    out.offset = integer(at(call.items[2]), "offset");
    out.shape = integers(at(call.items[3]), "shape");
    out.strides = integers(at(call.items[4]), "strides");
    check_extent(out);
    return out;
  }

  // ("storage", kind, key, device, elements), which are bytes where a kind says no type.
  Dtype open_storage(const PickleValue& stored, const PickleValue* type,
                     std::span<const std::byte>& bytes) const {
    if (stored.kind != Kind::kStored || at(stored.items[0]).kind != Kind::kTuple)
      fail("{}: a tensor without a storage", name_);
    const std::vector<uint32_t>& facts = at(stored.items[0]).items;
    if (facts.size() != 5 || at(facts[0]).text != "storage" || at(facts[1]).kind != Kind::kGlobal ||
        at(facts[2]).kind != Kind::kText)
      fail("{}: a storage described by {} values, expected 5", name_, facts.size());
    const std::string_view kind = at(facts[1]).text;
    if (type && kind != kUntyped)
      fail("{}: a storage of {}, expected one without a type", name_, dotted(kind));
    const Dtype dtype = type_named(type ? type->text : kind);
    const std::string_view key = at(facts[2]).text;
    const auto entry = bytes_of(text("data/{}", key));
    if (!entry) fail("{}: no entry data/{}, where the numbers of a tensor are", name_, shown(key));
    const int64_t count = integer(at(facts[4]), "size of a storage");
    const int64_t each = type ? 1 : dtype_bits(dtype) / 8;
    if (count > std::ssize(*entry) / each)
      fail("{}: data/{} has {} bytes, expected {} numbers of {}", name_, shown(key), entry->size(), count,
           each);
    bytes = *entry;
    return dtype;
  }

  Dtype type_named(std::string_view global) const {
    const auto found = std::ranges::find(kTypes, global, &TorchType::global);
    if (found == std::end(kTypes))
      refuse_torch_file(name_, text("it holds a tensor of {}", shown(dotted(global))));
    return found->dtype;
  }

  int64_t integer(const PickleValue& value, std::string_view what) const {
    if (value.kind != Kind::kInteger || value.integer < 0)
      fail("{}: the {} of a tensor is no count", name_, what);
    return value.integer;
  }
  std::vector<int64_t> integers(const PickleValue& tuple, std::string_view what) const {
    if (tuple.kind != Kind::kTuple || tuple.items.size() > kMostRank)
      fail("{}: the {} of a tensor is no tuple of at most {} numbers", name_, what, kMostRank);
    std::vector<int64_t> out;
    for (const uint32_t item : tuple.items) out.push_back(integer(at(item), what));
    return out;
  }

  // The last element lies in the storage.
  void check_extent(const TorchTensor& tensor) const {
    if (tensor.shape.size() != tensor.strides.size())
      fail("{}: a tensor with {} sizes and {} strides", name_, tensor.shape.size(), tensor.strides.size());
    if (std::ranges::find(tensor.shape, 0) != tensor.shape.end()) return;
    int64_t last = tensor.offset;
    for (size_t i = 0; i < tensor.shape.size(); ++i)
      last = checked_add(last, checked_mul(tensor.shape[i] - 1, tensor.strides[i], name_), name_);
    const int64_t each = dtype_bits(tensor.dtype) / 8, there = std::ssize(tensor.storage) / each;
    if (last >= there)
      fail("{}: a tensor {} reaches number {} of its storage, which has {}", name_, shape_text(tensor.shape),
           last, there);
  }

  const std::string_view name_;
  const std::vector<ZipEntry> entries_;
  std::string_view folder_;  // "counts/"
  Pickle pickle_;
};

bool is_old_torch_file(std::span<const std::byte> file) {
  return !file.empty() && file[0] == std::byte{0x80};  // the pickle of a magic number
}

}  // namespace

bool looks_like_torch_file(std::span<const std::byte> file) {
  return characters_of(file).starts_with(kZipMark) || is_old_torch_file(file);
}

TorchFile parse_torch_file(std::span<const std::byte> file, std::string_view name) {
  if (is_old_torch_file(file)) refuse_torch_file(name, "a torch file in the order of versions before 1.6");
  if (!characters_of(file).starts_with(kZipMark)) fail("{}: no zip archive, as torch.save writes", name);
  return TorchReader(file, name).read();
}

}  // namespace kt::inline weights
