#include "weights/kt/kt_names.h"

#include "base/error.h"
#include "base/text.h"

namespace kt::inline weights {
namespace {

constexpr uint64_t kLargestFile = uint64_t{1} << 48;

// What is left of a name while its front is taken off.
class Reader {
 public:
  explicit Reader(std::string_view text) : rest_(text) {}

  bool take(std::string_view expected) {
    if (!rest_.starts_with(expected)) return false;
    rest_.remove_prefix(expected.size());
    return true;
  }

  bool number(uint64_t largest, uint64_t& out) {
    size_t digits = 0;
    uint64_t value = 0;
    while (digits < rest_.size() && rest_[digits] >= '0' && rest_[digits] <= '9') {
      value = value * 10 + static_cast<uint64_t>(rest_[digits] - '0');
      if (value > largest) return false;
      if (++digits > 1 && rest_[0] == '0') return false;
    }
    rest_.remove_prefix(digits);
    out = value;
    return digits > 0;
  }

  bool number(int& out) {
    uint64_t value = 0;
    if (!number(kLargestKtNumber, value)) return false;
    out = static_cast<int>(value);
    return true;
  }

  // "up", "gate_bwd"
  bool projection(KtName& out) {
    for (const Projection projection : kProjections) {
      if (!take(name_of(projection))) continue;
      out.projection = projection;
      out.backward = take("_bwd");
      return true;
    }
    return false;
  }

  bool empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

std::string_view suffix(const KtName& name) { return name.backward ? "_bwd" : ""; }

std::optional<int> parse_numbered(std::string_view prefix, std::string_view name) {
  Reader reader(name);
  int number = 0;
  if (!reader.take(prefix) || !reader.number(number) || !reader.empty()) return std::nullopt;
  return number;
}

}  // namespace

std::string kt_tensor_name(const KtName& name) {
  return text("blk.{}.ffn_{}{}_exps.{}.numa.{}.{}", name.layer, name_of(name.projection), suffix(name),
              name.expert, name.part, name.scale ? "scale" : "weight");
}

std::string kt_file_name(const KtName& name, int bits, uint64_t bytes) {
  KT_CHECK(bits == 4 || bits == 8, "{} bits", bits);
  return text("_layer_{}/_numa_{}/INT{}_{}{}_{}_{}Byte_{}_.kt", name.layer, name.part, bits,
              name_of(name.projection), suffix(name), name.expert, bytes, name.scale ? "scale" : "quant");
}

std::optional<KtName> parse_kt_tensor_name(std::string_view name) {
  Reader reader(name);
  KtName out;
  if (!reader.take("blk.") || !reader.number(out.layer) || !reader.take(".ffn_") || !reader.projection(out) ||
      !reader.take("_exps.") || !reader.number(out.expert) || !reader.take(".numa.") ||
      !reader.number(out.part))
    return std::nullopt;
  out.scale = reader.take(".scale");
  if (!out.scale && !reader.take(".weight")) return std::nullopt;
  if (!reader.empty()) return std::nullopt;
  return out;
}

std::optional<int> parse_kt_layer_folder(std::string_view name) { return parse_numbered("_layer_", name); }
std::optional<int> parse_kt_part_folder(std::string_view name) { return parse_numbered("_numa_", name); }

std::optional<KtFileName> parse_kt_file_name(std::string_view name) {
  Reader reader(name);
  KtFileName out;
  if (reader.take("INT4_")) {
    out.bits = 4;
  } else if (!reader.take("INT8_")) {
    return std::nullopt;
  }
  if (!reader.projection(out.name) || !reader.take("_") || !reader.number(out.name.expert) ||
      !reader.take("_") || !reader.number(kLargestFile, out.bytes) || !reader.take("Byte_"))
    return std::nullopt;
  out.name.scale = reader.take("scale");
  if (!out.name.scale && !reader.take("quant")) return std::nullopt;
  if (!reader.take("_.kt") || !reader.empty()) return std::nullopt;
  return out;
}

std::string kt_other_name(std::string_view name) {
  constexpr std::string_view kLayers = "model.layers.", kModel = "model.";
  for (size_t at = 0; (at = name.find(kLayers, at)) != std::string_view::npos; ++at) {
    if (at != 0 && name[at - 1] != '.') continue;
    return std::string(name.substr(0, at)) + "blk." + std::string(name.substr(at + kLayers.size()));
  }
  return std::string(name.starts_with(kModel) ? name.substr(kModel.size()) : name);
}

}  // namespace kt::inline weights
