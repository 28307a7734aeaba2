#include "engine/loaded_model.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "base/error.h"
#include "base/memory.h"
#include "engine/gguf_vocabulary.h"
#include "engine/transformer_steps.h"
#include "models/families.h"
#include "weights/gguf/gguf_config.h"
#include "weights/requantise.h"

namespace kt {
namespace {

Json json_or_empty(const std::string& path) {
  return std::filesystem::exists(path) ? read_json(path) : Json::object();
}

// The text of a special token in tokenizer_config.json: a string, or an object that holds it.
std::optional<std::string> token_named(const Json& tokenizer_config, const char* name) {
  const auto found = tokenizer_config.find(name);
  if (found == tokenizer_config.end()) return std::nullopt;
  const Json content = found->is_object() ? found->value("content", Json()) : *found;
  if (!content.is_string()) return std::nullopt;
  return content.get<std::string>();
}

// eos_token_id of generation_config.json and config.json, a number or a list, and the eos_token of the
// tokenizer.
std::vector<int32_t> read_end_ids(const Checkpoint& checkpoint, const Json& tokenizer_config,
                                  const Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  const auto add = [&](const Json& value) {
    if (value.is_number_integer()) ids.push_back(value.get<int32_t>());
  };
  const Json generation =
      checkpoint.is_gguf() ? Json::object() : json_or_empty(checkpoint.folder() + "/generation_config.json");
  for (const Json& config : {generation, checkpoint.config_json()}) {
    const auto found = config.find("eos_token_id");
    if (found == config.end()) continue;
    if (found->is_array()) {
      for (const Json& id : *found) add(id);
    } else {
      add(*found);
    }
  }
  if (const auto token = token_named(tokenizer_config, "eos_token"))
    if (const auto id = tokenizer.id_of(*token)) ids.push_back(*id);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

Tokenizer read_tokenizer(const Checkpoint& checkpoint) {
  if (!checkpoint.is_gguf()) return Tokenizer::from_file(checkpoint.folder() + "/tokenizer.json");
  return Tokenizer::from_gguf(read_gguf_vocabulary(checkpoint).view());
}

Json read_template_tokens(const Checkpoint& checkpoint, const Json& tokenizer_config,
                          const Tokenizer& tokenizer) {
  Json out = Json::object();
  constexpr std::pair<const char*, const char*> kNames[] = {{"bos_token", "bos_token_id"},
                                                            {"eos_token", "eos_token_id"},
                                                            {"unk_token", "unknown_token_id"},
                                                            {"pad_token", "padding_token_id"}};
  for (const auto& [name, gguf_name] : kNames) {
    if (const auto token = token_named(tokenizer_config, name)) out[name] = *token;
    if (!checkpoint.is_gguf()) continue;
    const auto id = gguf_unsigned(checkpoint.gguf(), text("tokenizer.ggml.{}", gguf_name));
    if (!id || *id >= tokenizer.size()) continue;
    if (const auto token = tokenizer.token_of(static_cast<TokenId>(*id))) out[name] = *token;
  }
  return out;
}

std::string read_chat_template(const std::string& folder, const Json& tokenizer_config) {
  if (const auto file = read_small_file(folder + "/chat_template.jinja")) return *file;
  const auto found = tokenizer_config.find("chat_template");
  if (found == tokenizer_config.end()) return {};
  if (found->is_string()) return found->get<std::string>();
  // A list of named templates: the one called "default".
  if (found->is_array())
    for (const Json& entry : *found)
      if (entry.is_object() && entry.value("name", "") == "default") return entry.value("template", "");
  return {};
}

// What would make the model smaller, as far as the options leave it open.
std::string advice(const MemoryPlan& plan, const ModelOptions& options) {
  std::vector<std::string> flags;
  if (plan.experts > 0 && options.format.empty() && options.weights.empty()) flags.push_back("--format int4");
  if (plan.linears > plan.peak() / 10 && options.linear_format.empty())
    flags.push_back("--linear-format int8");
  if (plan.kv_cache > plan.peak() / 10) flags.push_back("a shorter context");
  std::string out;
  for (size_t i = 0; i < flags.size(); ++i)
    out += (i == 0 ? "; try " : i + 1 < flags.size() ? ", " : " or ") + flags[i];
  return out;
}

void check_memory(const std::string& path, const MemoryPlan& plan, uint64_t base,
                  const ModelOptions& options) {
  const uint64_t needed = base + plan.peak(), available = base + available_memory();
  const bool limited = options.max_memory > 0 && options.max_memory < available;
  const uint64_t most = limited ? options.max_memory : available;
  if (needed <= most) return;
  fail_as(ErrorKind::kMemory, "{}: {} of memory needed ({}), {} {}{}", path, human_bytes(needed),
          largest_parts(plan), human_bytes(most), limited ? "allowed by --max-memory" : "available",
          advice(plan, options));
}

// Every worker's heap keeps the pieces it packed from, megabytes that no step asks for in such blocks again.
void return_free_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// Experts from elsewhere have to be this model's.
void check_weights(const std::string& weights, const ExpertSource& source, const std::string& path,
                   const ModelSpec& spec) {
  const MoeSpec& moe = spec.moe;
  if (source.experts() != moe.experts || source.hidden() != spec.hidden || source.inter() != moe.inter)
    fail("{}: holds {} experts of {} x {}, {} has {} of {} x {}", weights, source.experts(), source.hidden(),
         source.inter(), path, moe.experts, spec.hidden, moe.inter);
  const std::vector<int> layers = source.layers();
  for (size_t i = 0; i < spec.layers.size(); ++i)
    if (spec.layers[i].moe && !std::ranges::binary_search(layers, static_cast<int>(i)))
      fail("{}: has no experts of layer {}, which {} needs; it has {} layers, {} to {}", weights, i, path,
           layers.size(), layers.front(), layers.back());
}

}  // namespace

LoadedModel::LoadedModel(const std::string& path, const ModelOptions& options)
    : path_(path), checkpoint_(std::make_unique<Checkpoint>(path)), tokenizer_(read_tokenizer(*checkpoint_)) {
  const auto start = std::chrono::steady_clock::now();
  base_bytes_ = own_memory();
  ModelSpec spec = describe_model(*checkpoint_);
  const bool moe =
      std::any_of(spec.layers.begin(), spec.layers.end(), [](const LayerSpec& layer) { return layer.moe; });
  for (const auto& [flag, value] : {std::pair("--weights", &options.weights), {"--format", &options.format}})
    if (!moe && !value->empty()) fail("{} {}: {} has no routed experts", flag, *value, path);
  std::unique_ptr<Checkpoint> weights;
  std::unique_ptr<ExpertSource> source, rounded;
  if (!options.weights.empty()) {
    if (is_kt_weights(options.weights)) {
      source = open_kt_weights(options.weights);
    } else {
      weights = std::make_unique<Checkpoint>(options.weights);
      source = open_experts(*weights);
    }
    check_weights(options.weights, *source, path, spec);
  } else if (moe) {
    source = open_experts(*checkpoint_);
  }
  if (source && !options.format.empty()) rounded = requantised(*source, format_named(options.format));
  if (source && options.rounding.experts) rounded = requantised(*source, options.rounding.experts, "rounded");
  const ExpertSource* experts = rounded ? rounded.get() : source.get();
  if (experts) dialect_ = std::string(experts->dialect());
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = options.threads, .nodes = options.nodes});
  TransformerOptions how{.precision = options.precision,
                         .kv_type = options.kv_type,
                         .max_tokens = options.max_tokens,
                         .experts = experts,
                         .linear_rounding = options.rounding.linears,
                         .sizes_only = true};
  if (!options.linear_format.empty()) how.linear_format = format_named(options.linear_format);
  transformer_ = std::make_unique<Transformer>(*checkpoint_, spec, pool, how);
  if (!options.sizes_only) {
    auto use = options.use;
    use.context = std::min(use.context, spec.context);  // no caller gets further
    check_memory(path, transformer_->memory_plan(use), base_bytes_, options);
    how.sizes_only = false;
    how.on_layer = options.on_layer;
    transformer_.reset();
    transformer_ = std::make_unique<Transformer>(*checkpoint_, std::move(spec), pool, how);
    return_free_memory();
  }
  load_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  // A GGUF file by itself is the model: what lies beside it may belong to another.
  const bool gguf = checkpoint_->is_gguf();
  const Json tokenizer_config =
      gguf ? Json::object() : json_or_empty(checkpoint_->folder() + "/tokenizer_config.json");
  end_ids_ = read_end_ids(*checkpoint_, tokenizer_config, tokenizer_);
  template_tokens_ = read_template_tokens(*checkpoint_, tokenizer_config, tokenizer_);
  chat_template_ = gguf ? std::string(gguf_string(checkpoint_->gguf(), "tokenizer.chat_template"))
                        : read_chat_template(checkpoint_->folder(), tokenizer_config);
}

LoadedModel::~LoadedModel() = default;

std::unique_ptr<Runner> LoadedModel::make_runner(int pages) {
  return std::make_unique<TransformerSteps>(*transformer_, pages);
}

}  // namespace kt
