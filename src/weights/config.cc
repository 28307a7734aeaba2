#include "weights/config.h"

#include <algorithm>
#include <climits>
#include <initializer_list>
#include <optional>

#include "base/error.h"
#include "text/shown.h"

namespace kt::inline weights {
namespace {

// No model comes near; what is derived from such a number stays small.
constexpr int kMostLayers = 100000, kMostExperts = 1000000;

using Spellings = std::initializer_list<std::string_view>;

// One JSON object with the way to it, for errors; null members are as good as absent.
class Section {
 public:
  // `file` and `key_names` outlive it; `path` leads to the object, "text_config.".
  Section(const Json& object, std::string_view file, std::string path, const KeyNames& key_names)
      : object_(&object), file_(file), path_(std::move(path)), key_names_(&key_names) {}

  std::string place(std::string_view key) const {
    const std::string whole = path_ + std::string(key);
    return text("{}: {}", file_, *key_names_ ? (*key_names_)(whole) : whole);
  }

  const Json* find(std::string_view key) const {
    const auto found = object_->find(key);
    return found == object_->end() || found->is_null() ? nullptr : &*found;
  }

  [[noreturn]] void wrong(std::string_view key, std::string_view expected) const {
    fail("{} is {}, expected {}", place(key), shown(brief(*find(key))), expected);
  }

  std::optional<Section> object(std::string_view key) const {
    const Json* const value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_object()) wrong(key, "an object");
    return Section(*value, file_, text("{}{}.", path_, key), *key_names_);
  }

  std::string string(std::string_view key) const {
    const Json* const value = find(key);
    if (value == nullptr) return {};
    if (!value->is_string()) wrong(key, "a string");
    return value->get<std::string>();
  }

  std::optional<bool> boolean(std::string_view key) const {
    const Json* const value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) wrong(key, "true or false");
    return value->get<bool>();
  }

  // -1 only where `least` allows it. A list of equal numbers, one a layer, counts as the number.
  std::optional<int> integer(std::string_view key, int least = 0) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (value->is_array() && !value->empty()) {
      const auto differs = [&](const Json& each) { return each != value->front(); };
      if (std::any_of(value->begin(), value->end(), differs)) wrong(key, "one number for all layers");
      value = &value->front();
    }
    const bool fits = value->is_number_unsigned() ? value->get<uint64_t>() <= INT_MAX
                      : value->is_number_integer()
                          ? value->get<int64_t>() >= least && value->get<int64_t>() <= INT_MAX
                          : false;
    if (!fits) wrong(key, text("a whole number from {} to {}", least, INT_MAX));
    return value->get<int>();
  }

  // The value of whichever spelling is there; those that are there agree.
  std::optional<int> integer(Spellings keys) const {
    std::optional<int> out;
    std::string_view first;
    for (const std::string_view key : keys) {
      const std::optional<int> value = integer(key);
      if (!value) continue;
      if (out && *out != *value) fail("{} is {}, but {} is {}", place(first), *out, place(key), *value);
      if (!out) first = key;
      out = value;
    }
    return out;
  }

  std::vector<int> integers(std::string_view key) const {
    const Json* const value = find(key);
    if (value == nullptr) return {};
    std::vector<int> out;
    const auto is_number = [](const Json& each) {
      return each.is_number_unsigned() && each.get<uint64_t>() <= INT_MAX;
    };
    if (!value->is_array() || !std::all_of(value->begin(), value->end(), is_number))
      wrong(key, "a list of numbers");
    for (const Json& each : *value) out.push_back(each.get<int>());
    return out;
  }

  std::vector<std::string> strings(std::string_view key) const {
    const Json* const value = find(key);
    if (value == nullptr) return {};
    const auto is_string = [](const Json& each) { return each.is_string(); };
    if (!value->is_array() || !std::all_of(value->begin(), value->end(), is_string))
      wrong(key, "a list of strings");
    return value->get<std::vector<std::string>>();
  }

  const Json& json() const { return *object_; }

 private:
  static std::string brief(const Json& value) {
    if (value.is_object()) return "an object";
    if (value.is_array()) return text("a list of {}", value.size());
    return value.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

  const Json* object_;
  std::string_view file_;
  std::string path_;
  const KeyNames* key_names_;
};

// The text model's section first, then those around it, which speak where it is silent.
std::vector<Section> sections_of(const Json& config, std::string_view name, const KeyNames& key_names) {
  std::vector<Section> out = {Section(config, name, "", key_names)};
  for (bool deeper = true; deeper;) {
    deeper = false;
    for (const std::string_view key : {"thinker_config", "text_config", "language_config", "llm_config"}) {
      const std::optional<Section> inner = out.front().object(key);
      if (!inner) continue;
      out.insert(out.begin(), *inner);
      deeper = true;
      break;
    }
  }
  return out;
}

class Sections {
 public:
  explicit Sections(std::vector<Section> list) : list_(std::move(list)) {}

  std::optional<int> integer(Spellings keys) const {
    for (const Section& each : list_)
      if (const std::optional<int> value = each.integer(keys)) return value;
    return std::nullopt;
  }
  std::string string(Spellings keys) const {
    for (const Section& each : list_)
      for (const std::string_view key : keys)
        if (std::string value = each.string(key); !value.empty()) return value;
    return {};
  }
  // The innermost section that has the key.
  const Section* having(std::string_view key) const {
    for (const Section& each : list_)
      if (each.find(key) != nullptr) return &each;
    return nullptr;
  }
  const Section& outermost() const { return list_.back(); }

 private:
  std::vector<Section> list_;
};

void read_block(const Section& from, std::string_view key, QuantizationConfig& out) {
  const std::vector<int> block = from.integers(key);
  if (block.empty()) return;
  if (block.size() != 2 || block[0] == 0 || block[1] == 0) from.wrong(key, "two block sizes");
  out.block_n = block[0];
  out.block_k = block[1];
}

// compressed-tensors: the group that is about experts where several are listed, else the first.
void read_groups(const Section& groups, QuantizationConfig& out) {
  std::optional<Section> chosen;
  for (const auto& [key, value] : groups.json().items()) {
    const std::optional<Section> group = groups.object(key);
    if (!group) continue;
    const std::vector<std::string> targets = group->strings("targets");
    const bool experts = std::any_of(targets.begin(), targets.end(),
                                     [](const std::string& t) { return t.find("expert") != t.npos; });
    if (!chosen || experts) chosen = group;
    if (experts) break;
  }
  if (!chosen) return;
  if (out.format.empty()) out.format = chosen->string("format");
  const std::optional<Section> weights = chosen->object("weights");
  if (!weights) return;
  out.bits = weights->integer("num_bits").value_or(0);
  out.symmetric = weights->boolean("symmetric").value_or(true);
  out.group_size = weights->integer("group_size", -1).value_or(0);
  const std::string strategy = weights->string("strategy");
  if (strategy == "channel") out.group_size = -1;
  if (strategy == "block") read_block(*weights, "block_structure", out);
}

QuantizationConfig read_quantization(const Section& from) {
  QuantizationConfig out;
  out.method = from.string("quant_method");
  out.format = from.string("format");
  out.checkpoint_format = from.string("checkpoint_format");
  for (const std::string_view key : {"bits", "w_bit"})
    if (const auto bits = from.integer(key)) out.bits = *bits;
  for (const std::string_view key : {"group_size", "q_group_size"})
    if (const auto size = from.integer(key, -1)) out.group_size = *size;
  read_block(from, "weight_block_size", out);
  if (const auto symmetric = from.boolean("sym")) out.symmetric = *symmetric;
  if (const auto zero_point = from.boolean("zero_point")) out.symmetric = !*zero_point;
  out.desc_act = from.boolean("desc_act").value_or(false);
  for (const std::string_view key : {"ignore", "modules_to_not_convert", "ignored_layers"})
    for (std::string& module : from.strings(key)) out.ignore.push_back(std::move(module));
  if (const auto groups = from.object("config_groups")) {
    if (out.method.empty()) out.method = "compressed-tensors";
    read_groups(*groups, out);
  }
  return out;
}

int bounded(std::optional<int> value, int most, std::string_view what, std::string_view name) {
  if (value.value_or(0) > most) fail("{}: {} {}, at most {} are read", name, *value, what, most);
  return value.value_or(0);
}

// "dense" or "sparse" for every layer: where a config says that, it is all there is to say.
bool read_mlp_layer_types(const Sections& config, std::string_view name, ModelConfig& out) {
  const Section* const section = config.having("mlp_layer_types");
  if (section == nullptr) return false;
  const std::vector<std::string> types = section->strings("mlp_layer_types");
  if (static_cast<int>(types.size()) < out.layers)
    fail("{}: mlp_layer_types has {} entries for {} layers", name, types.size(), out.layers);
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] != "dense" && types[i] != "sparse")
      fail("{}: mlp_layer_types[{}] is '{}', expected 'dense' or 'sparse'", name, i, shown(types[i]));
    if (types[i] == "dense") out.dense_layers.push_back(static_cast<int>(i));
  }
  return true;
}

// The numbers of layers with experts, if that is said; the same.
bool read_numbered_moe_layers(const Sections& config, std::string_view name, ModelConfig& out) {
  const Section* const section = config.having("moe_layers");
  if (section == nullptr) return false;
  std::vector<bool> sparse(static_cast<size_t>(out.layers));
  for (const int layer : section->integers("moe_layers")) {
    if (layer >= out.layers) fail("{}: moe_layers names layer {} of {}", name, layer, out.layers);
    sparse[static_cast<size_t>(layer)] = true;
  }
  for (int i = 0; i < out.layers; ++i)
    if (!sparse[static_cast<size_t>(i)]) out.dense_layers.push_back(i);
  return true;
}

// Which layers have experts, in the ways families say it.
void read_moe_layers(const Sections& config, std::string_view name, ModelConfig& out) {
  if (read_mlp_layer_types(config, name, out) || read_numbered_moe_layers(config, name, out)) return;
  out.dense_first =
      config.integer({"first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"}).value_or(0);
  if (const Section* const section = config.having("mlp_only_layers"))
    out.dense_layers = section->integers("mlp_only_layers");
  const Section* const frequency = config.having("moe_layer_freq");
  if (frequency != nullptr && frequency->find("moe_layer_freq")->is_array()) {
    const std::vector<int> flags = frequency->integers("moe_layer_freq");
    for (size_t i = 0; i < flags.size(); ++i)
      if (flags[i] == 0) out.dense_layers.push_back(static_cast<int>(i));
  } else if (frequency != nullptr) {
    out.moe_every = config.integer({"moe_layer_freq"}).value_or(1);
  } else if (const auto step =
                 config.integer({"decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"})) {
    out.moe_every = *step;
    out.moe_phase = 1;
  }
  if (out.moe_every == 0) {
    if (out.experts > 0) fail("{}: experts in every 0th layer", name);
    out.moe_every = 1;
  }
  const Section* const end = config.having("moe_layer_end_index");
  const int last = end ? *end->integer("moe_layer_end_index", -1) : -1;  // -1: the last layer
  for (int i = last < 0 ? out.layers : last; ++i < out.layers;) out.dense_layers.push_back(i);
  std::sort(out.dense_layers.begin(), out.dense_layers.end());
  out.dense_layers.erase(std::unique(out.dense_layers.begin(), out.dense_layers.end()),
                         out.dense_layers.end());
}

}  // namespace

bool ModelConfig::is_moe_layer(int layer) const {
  return experts > 0 && layer >= dense_first && layer < layers && (layer + moe_phase) % moe_every == 0 &&
         !std::binary_search(dense_layers.begin(), dense_layers.end(), layer);
}

ModelConfig read_model_config(const Json& json, std::string_view name, const KeyNames& key_names) {
  if (!json.is_object()) fail("{}: expected a JSON object", name);
  const Sections config(sections_of(json, name, key_names));
  ModelConfig out;
  // The whole model's architecture, but the text model's type.
  const std::vector<std::string> architectures = config.outermost().strings("architectures");
  if (!architectures.empty()) out.architecture = architectures.front();
  out.model_type = config.string({"model_type"});
  out.dtype = config.string({"torch_dtype", "dtype"});

  std::optional<int> layers = config.integer({"num_hidden_layers", "n_layer", "n_layers"});
  if (!layers) layers = config.integer({"num_layers"});
  out.layers = bounded(layers, kMostLayers, "layers", name);
  out.hidden = config.integer({"hidden_size", "n_embd", "d_model"}).value_or(0);
  out.experts = bounded(config.integer({"num_experts", "n_routed_experts", "num_local_experts",
                                        "moe_num_experts", "num_moe_experts", "moe_num_primary_experts"}),
                        kMostExperts, "experts", name);
  out.top_k = config
                  .integer({"num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk",
                            "moe_top_k", "moe_k", "num_selected_experts", "moe_num_active_primary_experts",
                            "top_k_experts"})
                  .value_or(0);
  std::optional<int> inter = config.integer(
      {"moe_intermediate_size", "expert_ffn_hidden_size", "expert_hidden_dim", "moe_ffn_hidden_size"});
  if (!inter && out.experts > 0) inter = config.integer({"intermediate_size"});
  out.inter = inter.value_or(0);
  out.mtp_layers =
      bounded(config.integer({"num_nextn_predict_layers"}), kMostLayers, "layers to predict", name);
  read_moe_layers(config, name, out);
  for (const std::string_view key : {"quantization_config", "compression_config"}) {
    const Section* const section = config.having(key);
    if (section == nullptr) continue;
    out.quantization = read_quantization(*section->object(key));
    break;
  }
  return out;
}

}  // namespace kt::inline weights
