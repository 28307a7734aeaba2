// Logits of token sequences, for tests that compare with other programs, and with ourselves of another day:
//
//   model_probe MODEL [--acts f32|bf16|int8|default] [--kv f32|bf16|int8] [--chunk N | --cuts A,B,...]
//               [--threads N] [--shards N] [--weights EXPERTS] [--format NAME] [--linear-format NAME]
//               [--rules FILE] [--rule-devices OLD=NEW,...] [--place REGEX=DEVICE[:FORMAT]]...
//               [--gpu N [--hot N] [--stream N]] [--split PLACE=LAYERS,...] [--adapter PATH]... [--use N] < ids
//
// ids: token ids, one sequence a line. Standard output: little-endian f32 [tokens of all sequences in order,
// vocab]. All sequences run side by side: N tokens of each in one step, or those up to the next cut (default:
// all). The cache is f32 with f32 activations and bf16 with others unless --kv says otherwise; --weights,
// --format, --linear-format and rules are those of kt generate; --shards are slices of every expert, as if there
// were so many NUMA nodes; --hot N gives copies of every Nth expert of each layer to the GPU; --split 0=2,cpu=1,1=3 has
// two layers on GPU 0, one on the CPU and three on GPU 1, each with operations of its own, the last with the head; of
// the adapters --use N runs with the Nth.
#include <cstdio>
#include <cstring>
#include <iostream>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "models/families.h"
#include "models/placed_rules.h"
#include "models/transformer.h"
#include "nn/cpu_ops.h"
#include "nn/gpu_ops.h"
#include "weights/kt/kt_origin.h"

namespace kt::inline models {
namespace {

struct Flags {
  std::string model, weights, format, linear_format;
  RuleWords rules;
  Precision precision = Precision::kF32;
  std::optional<KvType> kv;
  std::vector<size_t> cuts;  // positions at which a step begins, ascending
  int chunk = 0, threads = 0, shards = 0;
  int gpu = -1;       // none
  std::string split;  // in place of it
  int hot = 0;        // of how many experts one is on the GPU; 0: none is
  int stream = 0;     // tokens from which experts pass through it; 0: none do
  std::vector<std::string> adapters;
  int use = -1;  // of the adapters
};

std::vector<size_t> numbers(const std::string& list) {
  std::istringstream in(list);
  std::vector<size_t> out;
  for (std::string word; std::getline(in, word, ',');) out.push_back(std::stoul(word));
  return out;
}

Flags parse(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto next = [&] { return i + 1 < argc ? std::string(argv[++i]) : std::string(); };
    if (word == "--acts") {
      flags.precision = precision_named(next());
    } else if (word == "--chunk") {
      flags.chunk = std::atoi(next().c_str());
    } else if (word == "--cuts") {
      flags.cuts = numbers(next());
    } else if (word == "--threads") {
      flags.threads = std::atoi(next().c_str());
    } else if (word == "--shards") {
      flags.shards = std::atoi(next().c_str());
    } else if (word == "--gpu") {
      flags.gpu = std::atoi(next().c_str());
    } else if (word == "--stream") {
      flags.stream = std::atoi(next().c_str());
    } else if (word == "--hot") {
      flags.hot = std::atoi(next().c_str());
    } else if (word == "--split") {
      flags.split = next();
    } else if (word == "--adapter") {
      flags.adapters.push_back(next());
    } else if (word == "--use") {
      flags.use = std::atoi(next().c_str());
    } else if (word == "--weights") {
      flags.weights = next();
    } else if (word == "--kv") {
      flags.kv = kv_type_named(next());
    } else if (word == "--format") {
      flags.format = next();
    } else if (word == "--linear-format") {
      flags.linear_format = next();
    } else if (word == "--rules") {
      flags.rules.file = next();
    } else if (word == "--rule-devices") {
      flags.rules.devices = next();
    } else if (word == "--place") {
      flags.rules.place.push_back(next());
    } else if (word.starts_with("--")) {
      fail("{}: no such flag", word);
    } else {
      flags.model = word;
    }
  }
  return flags;
}

std::vector<std::vector<int32_t>> read_sequences() {
  std::vector<std::vector<int32_t>> out;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::vector<int32_t> ids;
    for (int32_t id; words >> id;) ids.push_back(id);
    if (!ids.empty()) out.push_back(std::move(ids));
  }
  return out;
}

// Where steps begin, and the end.
std::vector<size_t> steps_of(const Flags& flags, size_t longest) {
  std::vector<size_t> out = {0};
  const size_t chunk = flags.chunk > 0 ? static_cast<size_t>(flags.chunk) : longest;
  if (flags.cuts.empty())
    for (size_t at = chunk; at < longest; at += chunk) out.push_back(at);
  for (const size_t cut : flags.cuts) {
    if (cut <= out.back()) fail("--cuts: {} after {}", cut, out.back());
    if (cut < longest) out.push_back(cut);
  }
  out.push_back(longest);
  return out;
}

// The model, and what it was read from: the embedding stays there.
struct Loaded {
  explicit Loaded(const std::string& path) : parts(open_model_parts(path, gguf_families())) {}
  const ModelParts parts;
  std::optional<Transformer> model;
};

// Layer by layer, from the last expert down.
std::vector<std::vector<int>> hot_experts(const ModelSpec& spec, int every) {
  std::vector<std::vector<int>> out(spec.layers.size());
  for (size_t i = 0; every > 0 && i < out.size(); ++i) {
    const int experts = spec.layers[i].moe() ? spec.layers[i].moe()->experts : 0;
    for (int e = (experts - 1) % every; e < experts; e += every) out[i].push_back(e);
  }
  return out;
}

std::optional<Format> format_or_none(const std::string& name) {
  return name.empty() ? std::nullopt : std::optional(format_named(name));
}

std::shared_ptr<Ops> ops_on(int gpu, int stream, const std::shared_ptr<Pool>& pool) {
  if (gpu < 0) return make_cpu_ops(pool);
  return make_gpu_ops(pool, {.number = gpu, .gpu = std::make_shared<Gpu>(gpu), .stream_from = stream});
}

std::vector<PlacedLayers> places_of(const Flags& flags, const ModelSpec& spec,
                                    const std::shared_ptr<Pool>& pool) {
  std::vector<PlacedLayers> out;
  std::istringstream in(flags.split);
  for (std::string word; std::getline(in, word, ',');) {
    const size_t at = word.find('=');
    if (at == std::string::npos) fail("--split {}: expected PLACE=LAYERS", word);
    const std::string place = word.substr(0, at);
    out.push_back(
        {ops_on(place == "cpu" ? -1 : std::stoi(place), flags.stream, pool), std::stoi(word.substr(at + 1))});
  }
  if (out.empty())
    out.push_back({ops_on(flags.gpu, flags.stream, pool), static_cast<int>(std::ssize(spec.layers))});
  return out;
}

std::unique_ptr<Loaded> load(const Flags& flags, size_t max_tokens) {
  auto out = std::make_unique<Loaded>(flags.model);
  const Checkpoint& checkpoint = *out->parts.checkpoint;
  const std::string& experts = flags.weights.empty() ? out->parts.experts : flags.weights;
  std::unique_ptr<Checkpoint> weights;
  std::unique_ptr<ExpertSource> source, rounded;
  if (!experts.empty() && is_kt_weights(experts)) {
    source = open_kt_weights(experts);
  } else if (!experts.empty()) {
    weights = std::make_unique<Checkpoint>(experts, gguf_families());
    source = open_experts(*weights);
  }
  ModelSpec spec = describe_model(checkpoint);
  const std::optional<RuleFile> rules = read_rules(flags.rules);
  if (!source && spec.moe() && (!flags.format.empty() || rules)) source = open_own_experts(checkpoint);
  std::optional<PlacedRules> placed;
  if (rules) {
    ModuleTree tree = module_tree(spec);
    add_stored_formats(tree, checkpoint, source.get());
    placed = place_by_rules(
        *rules, std::move(tree),
        {.experts = format_or_none(flags.format), .linears = format_or_none(flags.linear_format)});
    if (source) rounded = requantised(*source, placed->expert_formats(), "rules");
  } else if (!flags.format.empty()) {
    rounded = requantised(*source, format_named(flags.format));
  }
  TransformerOptions options{
      .precision = flags.precision,
      .kv_type = flags.kv.value_or(flags.precision == Precision::kF32 ? KvType::kF32 : KvType::kBf16),
      .max_tokens = static_cast<int>(max_tokens),
      .experts = rounded ? rounded.get() : source.get()};
  if (placed)
    options.linear_formats = placed->linear_formats();
  else
    options.linear_format = format_or_none(flags.linear_format);
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = flags.threads, .nodes = flags.shards});
  std::vector<PlacedLayers> places = places_of(flags, spec, pool);
  options.hot = hot_experts(spec, flags.hot);
  for (const std::string& path : flags.adapters)
    options.adapters.push_back(
        std::make_shared<const LoraFile>(path, gguf_families(), attention_heads(checkpoint.config_json())));
  out->model.emplace(checkpoint, std::move(spec), std::move(places), std::move(options));
  return out;
}

// Each sequence's own pages, in no particular order, because nothing may depend on it.
std::vector<std::vector<int32_t>> page_tables(size_t sequences, size_t pages) {
  std::vector<std::vector<int32_t>> out(sequences);
  for (size_t s = 0; s < sequences; ++s)
    for (size_t p = 0; p < pages; ++p)
      out[s].push_back(static_cast<int32_t>((pages - 1 - p) * sequences + s));
  return out;
}

void run(const Flags& flags) {
  const auto sequences = read_sequences();
  size_t longest = 0;
  for (const auto& ids : sequences) longest = std::max(longest, ids.size());
  if (longest == 0) fail("no token ids on standard input");
  const std::vector<size_t> steps = steps_of(flags, longest);
  size_t widest = 0;
  for (size_t i = 0; i + 1 < steps.size(); ++i) widest = std::max(widest, steps[i + 1] - steps[i]);
  const std::unique_ptr<Loaded> loaded = load(flags, widest * sequences.size());
  Transformer& model = *loaded->model;
  const size_t pages = (longest + kPageTokens - 1) / kPageTokens;
  const int slots = model.keeps().states.empty() ? 0 : static_cast<int>(sequences.size());
  const auto cache = model.make_cache(static_cast<int>(pages * sequences.size()), slots);
  for (int slot = 0; slot < slots; ++slot) cache->clear_slot(slot);
  const auto tables = page_tables(sequences.size(), pages);
  const auto vocab = static_cast<size_t>(model.spec().vocab);
  std::vector<std::vector<float>> logits(sequences.size());
  for (size_t step = 0; step + 1 < steps.size(); ++step) {
    const size_t at = steps[step], count = steps[step + 1] - at;
    std::vector<SequenceInput> inputs;
    std::vector<size_t> who;
    for (size_t s = 0; s < sequences.size(); ++s) {
      if (at >= sequences[s].size()) continue;
      const std::span<const int32_t> ids(sequences[s]);
      inputs.push_back({.tokens = ids.subspan(at, std::min(count, ids.size() - at)),
                        .position = static_cast<int>(at),
                        .pages = tables[s].data(),
                        .slot = slots ? slots - 1 - static_cast<int>(s) : -1,
                        .logits = SequenceInput::Logits::kAll,
                        .adapter = flags.use});
      who.push_back(s);
    }
    std::vector<float> rows(static_cast<size_t>(Transformer::logit_rows(inputs)) * vocab);
    model.forward(*cache, inputs, rows.data());
    size_t row = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const size_t size = inputs[i].tokens.size() * vocab;
      logits[who[i]].insert(logits[who[i]].end(), rows.begin() + static_cast<int64_t>(row),
                            rows.begin() + static_cast<int64_t>(row + size));
      row += size;
    }
  }
  for (const auto& rows : logits) std::fwrite(rows.data(), sizeof(float), rows.size(), stdout);
}

}  // namespace
}  // namespace kt::inline models

int main(int argc, char** argv) {
  try {
    kt::run(kt::parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "model_probe: %s\n", error.what());
    return 2;
  }
}
