#include "weights/dialects/expert_names.h"

#include <charconv>

namespace kt::inline weights {
namespace {

struct Prefix {
  std::string_view text;
  bool extra = false;
};
constexpr Prefix kPrefixes[] = {
    {"model.layers."},     {"language_model.model.layers."}, {"model.language_model.layers."}, {"layers."},
    {"mtp.layers.", true}, {"model.mtp.layers.", true},
};

// Between "<layer>." and the expert's number or the fused projection.
constexpr std::string_view kGroups[] = {"mlp.experts.", "block_sparse_moe.experts.", "experts.",
                                        "ffn.experts.", "feed_forward.experts."};

struct PartName {
  std::string_view text;
  NamedPart part;
};
constexpr PartName kPerExpert[] = {
    {"gate_proj", NamedPart::kGate}, {"up_proj", NamedPart::kUp}, {"down_proj", NamedPart::kDown},
    {"w1", NamedPart::kGate},        {"w3", NamedPart::kUp},      {"w2", NamedPart::kDown},
    {"gate", NamedPart::kGate},      {"up", NamedPart::kUp},      {"down", NamedPart::kDown},
};
constexpr PartName kFused[] = {
    {"gate_up_proj", NamedPart::kGateUp},
    {"gate_proj", NamedPart::kGate},
    {"up_proj", NamedPart::kUp},
    {"down_proj", NamedPart::kDown},
};
constexpr PartName kGgufFused[] = {
    {"ffn_gate_up_exps", NamedPart::kGateUp},
    {"ffn_gate_exps", NamedPart::kGate},
    {"ffn_up_exps", NamedPart::kUp},
    {"ffn_down_exps", NamedPart::kDown},
};
constexpr PartName kGgufPerExpert[] = {
    {"ffn_gate.", NamedPart::kGate},
    {"ffn_up.", NamedPart::kUp},
    {"ffn_down.", NamedPart::kDown},
};

// What is left of a name while it is read from the front.
struct Reader {
  std::string_view rest;

  bool skip(std::string_view text) {
    if (!rest.starts_with(text)) return false;
    rest.remove_prefix(text.size());
    return true;
  }
  // Digits without leading zeros, or -1; consumes them.
  int number() {
    int value = -1;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    if (error != std::errc() || value < 0) return -1;
    const auto digits = static_cast<size_t>(end - rest.data());
    if (digits > 1 && rest.front() == '0') return -1;
    rest.remove_prefix(digits);
    return value;
  }
};

// The rest is a suffix: "", ".weight", or "_blocks" where `underscore` separates too.
std::optional<std::string_view> suffix_of(std::string_view rest, std::string_view separators) {
  if (rest.empty()) return rest;
  if (rest.size() < 2 || separators.find(rest.front()) == std::string_view::npos) return std::nullopt;
  return rest.substr(1);
}

// Fills projection, suffix and module from the first of `names` that stands here.
template <size_t kCount>
bool read_projection(std::string_view tensor, std::string_view rest, const PartName (&names)[kCount],
                     std::string_view separators, ExpertName& out) {
  for (const PartName& name : names) {
    if (!rest.starts_with(name.text)) continue;
    const auto suffix = suffix_of(rest.substr(name.text.size()), separators);
    if (!suffix) continue;
    out.part = name.part;
    out.projection = rest.substr(0, name.text.size());
    out.suffix = *suffix;
    out.module =
        tensor.substr(0, static_cast<size_t>(out.projection.data() - tensor.data()) + name.text.size());
    return true;
  }
  return false;
}

std::optional<ExpertName> parse_gguf(std::string_view tensor) {
  Reader reader{tensor};
  ExpertName out;
  if (!reader.skip("blk.")) return std::nullopt;
  out.prefix = tensor.substr(0, 4);
  out.layer = reader.number();
  if (out.layer < 0) return std::nullopt;
  out.stem = tensor.substr(0, tensor.size() - reader.rest.size());
  if (!reader.skip(".")) return std::nullopt;
  if (read_projection(tensor, reader.rest, kGgufFused, ".", out)) return out;
  for (const PartName& name : kGgufPerExpert) {
    Reader inner = reader;
    if (!inner.skip(name.text)) continue;
    out.expert = inner.number();
    const auto suffix = suffix_of(inner.rest, ".");
    if (out.expert < 0 || !suffix) return std::nullopt;
    out.part = name.part;
    out.projection = name.text.substr(0, name.text.size() - 1);
    out.suffix = *suffix;
    out.module = tensor.substr(0, tensor.size() - inner.rest.size());
    return out;
  }
  return std::nullopt;
}

std::optional<ExpertName> parse_after_prefix(std::string_view tensor, const Prefix& prefix) {
  Reader reader{tensor};
  ExpertName out;
  reader.skip(prefix.text);
  out.prefix = tensor.substr(0, prefix.text.size());
  out.extra = prefix.extra;
  out.layer = reader.number();
  if (out.layer < 0 || !reader.skip(".")) return std::nullopt;
  for (const std::string_view group : kGroups) {
    Reader inner = reader;
    if (!inner.skip(group)) continue;
    out.stem = tensor.substr(0, tensor.size() - inner.rest.size() - 1);
    if (read_projection(tensor, inner.rest, kFused, "._", out)) return out;
    out.expert = inner.number();
    if (out.expert >= 0 && inner.skip(".") && read_projection(tensor, inner.rest, kPerExpert, ".", out))
      return out;
    return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

std::optional<ExpertName> parse_expert_name(std::string_view tensor) {
  if (tensor.starts_with("blk.")) return parse_gguf(tensor);
  for (const Prefix& prefix : kPrefixes)
    if (tensor.starts_with(prefix.text)) return parse_after_prefix(tensor, prefix);
  return std::nullopt;
}

}  // namespace kt::inline weights
