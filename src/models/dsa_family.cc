// What families whose layers choose their keys share: how configs describe the indexers, and which layers have one.
#include <algorithm>

#include "models/dsa_gguf.h"
#include "models/family.h"
#include "text/shown.h"
#include "weights/gguf/gguf_config.h"

namespace kt::inline models {
namespace {

constexpr const char kTypes[] = "indexer_types";
constexpr std::string_view kPattern = "index_topk_pattern", kOffset = "index_skip_topk_offset";

// Which layers share the choice of a layer before them, in the way the config says it.
std::vector<bool> listed_shared(const ConfigReader& config, size_t layers) {
  const std::vector<std::string> types = config.strings(kTypes);
  if (types.size() != layers) config.wrong(kTypes, text("one for each of {} layers", layers));
  std::vector<bool> out;
  for (size_t i = 0; i < layers; ++i) {
    if (types[i] != "full" && types[i] != "shared")
      fail_as(ErrorKind::kUnsupported, "{}[{}] is {}; supported: full, shared", config.place(kTypes), i,
              shown(types[i]));
    out.push_back(types[i] == "shared");
  }
  return out;
}

std::vector<bool> patterned_shared(const ConfigReader& config, size_t layers) {
  const std::string pattern = config.string(kPattern, "");
  if (pattern.size() != layers) config.wrong(kPattern, text("one letter for each of {} layers", layers));
  if (pattern.find_first_not_of("FS") != std::string::npos) config.unsupported(kPattern, "letters F and S");
  std::vector<bool> out;
  for (const char letter : pattern) out.push_back(letter == 'S');
  return out;
}

std::vector<bool> every_so_many_shared(const ConfigReader& config, size_t layers) {
  const int every = config.integer("index_topk_freq", 1, 1), offset = config.integer(kOffset, 2);
  std::vector<bool> out;
  for (int i = 0; i < static_cast<int>(layers); ++i) out.push_back(std::max(i - offset + 1, 0) % every != 0);
  return out;
}

std::vector<bool> read_shared(const ConfigReader& config, size_t layers) {
  const bool listed = config.has(kTypes), patterned = config.has(kPattern);
  const std::vector<bool> out = listed      ? listed_shared(config, layers)
                                : patterned ? patterned_shared(config, layers)
                                            : every_so_many_shared(config, layers);
  if (out.front())
    fail("{}: layer 0 shares the keys that a layer before it chose, and there is none before it",
         config.place(listed      ? kTypes
                      : patterned ? kPattern
                                  : kOffset));
  return out;
}

IndexerSpec read_indexer(const ConfigReader& config, const MlaSpec& mla, bool neighbours) {
  if (mla.q_rank == 0) config.wrong("q_lora_rank", "a whole number of at least 1");
  IndexerSpec out{.heads = config.integer("index_n_heads"),
                  .dim = config.integer("index_head_dim"),
                  .budget = config.integer("index_topk"),
                  .rope = mla.rope,
                  .names = {}};
  out.rope.interleaved = config.boolean("indexer_rope_interleave", neighbours);
  if (out.dim < mla.rotated)
    config.wrong("index_head_dim", text("at least qk_rope_head_dim, {}", mla.rotated));
  if (static_cast<int64_t>(out.heads) * out.dim > ConfigReader::kMost)
    fail("{}: {} heads of {} numbers, at most {} numbers together are read", config.place("index_n_heads"),
         out.heads, out.dim, ConfigReader::kMost);
  return out;
}

void check_layer_lists(const ConfigReader& config, size_t layers) {
  const auto check = [&](std::string_view key) {
    const std::vector<std::string> list = config.strings(key);
    if (config.has(key) && list.size() != layers)
      config.wrong(key, text("one string for each of {} layers", layers));
    return list;
  };
  check("mlp_layer_types");
  const std::vector<std::string> types = check("layer_types");
  for (size_t i = 0; i < types.size(); ++i)
    if (types[i] != "indexed_attention")
      fail_as(ErrorKind::kUnsupported, "{}[{}] is {}; supported: indexed_attention",
              config.place("layer_types"), i, shown(types[i]));
}

}  // namespace

ModelSpec describe_indexed(const ConfigReader& config, const IndexedDefaults& defaults) {
  ModelSpec spec = describe_common(config, defaults.norm_eps);
  refuse_moe_layer_freq(config);
  refuse_mlp_bias(config);
  refuse_query_growth(config);
  require_dense_layers(config);
  check_layer_lists(config, spec.layers.size());
  const MlaSpec mla = read_rotating_mla(config, spec);
  MoeSpec moe = read_experts(config, {.experts = "n_routed_experts"});
  read_sigmoid_router(config, 2.5, moe);
  read_shared_experts(config, moe);
  fill_layers(config, mla, moe, spec);
  const IndexerSpec indexer = read_indexer(config, mla, defaults.neighbours);
  const std::vector<bool> shared = read_shared(config, spec.layers.size());
  for (size_t i = 0; i < shared.size(); ++i) {
    auto& mixer = std::get<MlaSpec>(spec.layers[i].mixer);
    mixer.indexer = indexer;
    mixer.indexer->shared = shared[i];
  }
  return spec;
}

// Newer files say which layers choose; of the others those without an indexer do not. Where all have one, as converters
// once copied them, a context of a million tokens tells models whose layers share: two, and then one of four, choose.
void complete_indexed(GgufFacts& facts) {
  complete_deepseek_v3(facts);
  constexpr uint64_t kLongContext = 1 << 20;
  const uint64_t layers = std::min<uint64_t>(facts.known("num_hidden_layers"), 10000);
  const bool some_without = [&] {
    for (uint64_t i = 0; i < layers; ++i)
      if (!facts.find(text("blk.{}.indexer.attn_k.weight", i))) return true;
    return false;
  }();
  const std::vector<bool> said = facts.flags("attention.indexer.types");
  const bool fours = facts.known("max_position_embeddings") >= kLongContext;
  Json types = Json::array();
  for (uint64_t i = 0; i < (said.empty() ? layers : said.size()); ++i) {
    const bool chooses = !said.empty()  ? said[i]
                         : some_without ? facts.find(text("blk.{}.indexer.attn_k.weight", i)) != nullptr
                                        : !fours || i < 2 || (i - 2) % 4 == 0;
    // Files may count layers for further tokens too.
    if (i < layers || said.size() != layers + facts.known("num_nextn_predict_layers"))
      types.push_back(chooses ? "full" : "shared");
  }
  facts.config()[kTypes] = types;
}

}  // namespace kt::inline models
