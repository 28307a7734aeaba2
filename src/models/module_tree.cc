#include "models/module_tree.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "base/error.h"
#include "weights/linears.h"
#include "weights/stored_names.h"

namespace kt::inline models {
namespace {

// Words that mean the same in names of different times and families. A router's is the end of its name.
struct SameWords {
  std::vector<std::string_view> words;
  bool of_routers = false;
};
const std::vector<SameWords>& same_words() {
  static const std::vector<SameWords> all = {
      {{"mlp", "block_sparse_moe", "feed_forward"}},
      {{"shared_experts", "shared_expert", "shared_mlp"}},
      {{"gate_proj", "w1"}},
      {{"up_proj", "w3"}},
      {{"down_proj", "w2"}},
      {{"router.gate", "router.proj", "router", "primary_router", "gate"}, true},
  };
  return all;
}

bool is_word_character(char c) {
  return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

// Whether it stands there by itself; dots of the word may be escaped in the pattern.
bool has_word(std::string_view pattern, std::string_view word) {
  std::string plain;
  for (const char c : pattern)
    if (c != '\\') plain += c;
  for (size_t at = plain.find(word); at != std::string::npos; at = plain.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !is_word_character(plain[at - 1])) &&
        (end == plain.size() || !is_word_character(plain[end])))
      return true;
  }
  return false;
}

// Where the components of `word` stand in a name; npos: nowhere.
size_t find_components(std::string_view name, std::string_view word, bool at_end) {
  for (size_t at = name.find(word); at != std::string_view::npos; at = name.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || name[at - 1] == '.') && (end == name.size() || (!at_end && name[end] == '.'))) return at;
  }
  return std::string_view::npos;
}

std::string parent_of(const std::string& name) { return name.substr(0, name.rfind('.')); }

class TreeBuilder {
 public:
  explicit TreeBuilder(const ModelSpec& spec) : spec_(spec) { tree_.family = spec.family; }

  ModuleTree build() {
    const size_t root = open({.name = ""});
    const size_t decoder = open({.name = parent_of(spec_.prefix), .kind = ModuleKind::kDecoder});
    add({.name = spec_.embedding,
         .kind = ModuleKind::kEmbedding,
         .part = ModulePart::kEmbedding,
         .n = spec_.vocab,
         .k = spec_.hidden});
    const size_t list = open({.name = spec_.prefix, .kind = ModuleKind::kList});
    for (size_t i = 0; i < spec_.layers.size(); ++i) add_layer(static_cast<int>(i), spec_.layers[i]);
    close(list);
    norm(spec_.final_norm, ModulePart::kFinalNorm, spec_.hidden);
    add({.name = parent_of(spec_.prefix) + ".rotary_emb",
         .kind = ModuleKind::kRotary,
         .part = ModulePart::kRotary});
    close(decoder);
    matrix(spec_.head, ModulePart::kHead, spec_.vocab, spec_.hidden);
    close(root);
    return std::move(tree_);
  }

 private:
  size_t open(ModelModule module) {
    module.layer = layer_;
    tree_.modules.push_back(std::move(module));
    return tree_.modules.size() - 1;
  }
  void close(size_t module) { tree_.modules[module].end = tree_.modules.size(); }
  void add(ModelModule module) { close(open(std::move(module))); }
  std::string in_layer(const std::string& name) const { return text("{}.{}.{}", spec_.prefix, layer_, name); }

  void norm(const std::string& name, ModulePart part, int64_t size) {
    add({.name = name, .kind = ModuleKind::kNorm, .part = part, .n = size});
  }
  void matrix(const std::string& name, ModulePart part, int64_t n, int64_t k, bool bias = false) {
    add({.name = name, .kind = ModuleKind::kLinear, .part = part, .n = n, .k = k, .bias = bias});
  }
  void exact_matrix(const std::string& name, ModulePart part, int64_t n, int64_t k) {
    add({.name = in_layer(name), .kind = ModuleKind::kLinear, .part = part, .n = n, .k = k, .exact = true});
  }

  void add_layer(int layer, const LayerSpec& spec) {
    layer_ = layer;
    const size_t at = open(
        {.name = text("{}.{}", spec_.prefix, layer), .kind = ModuleKind::kLayer, .part = ModulePart::kLayer});
    std::visit([&](const auto& mixer) { add_mixer(mixer); }, spec.mixer);
    std::visit([&](const auto& part) { add_feed_forward(part); }, spec.feed_forward);
    norm(in_layer(spec.input_norm), ModulePart::kNorms, spec_.hidden);
    norm(in_layer(spec.post_norm), ModulePart::kNorms, spec_.hidden);
    if (spec.residual == Residual::kBothNorms)
      for (const std::string& name : {spec.mixed_norm, spec.fed_norm})
        norm(in_layer(name), ModulePart::kNorms, spec_.hidden);
    close(at);
    layer_ = -1;
  }

  size_t open_attention(const std::string& one_of_it, ModuleKind kind = ModuleKind::kAttention) {
    return open({.name = in_layer(parent_of(one_of_it)), .kind = kind, .part = ModulePart::kAttention});
  }
  void attention_matrix(const std::string& name, int64_t n, int64_t k, bool bias) {
    matrix(in_layer(name), ModulePart::kAttention, n, k, bias);
  }
  void attention_norm(const std::string& name, int64_t size) {
    norm(in_layer(name), ModulePart::kAttention, size);
  }

  void add_mixer(const GqaSpec& gqa) {
    const size_t at = open_attention(gqa.names.o);
    const int64_t q = int64_t{gqa.heads} * gqa.head_dim, kv = int64_t{gqa.kv_heads} * gqa.head_dim;
    attention_matrix(gqa.names.q, gqa.gated ? 2 * q : q, spec_.hidden, gqa.qkv_bias);
    attention_matrix(gqa.names.k, kv, spec_.hidden, gqa.qkv_bias);
    if (!gqa.keys_as_values) attention_matrix(gqa.names.v, kv, spec_.hidden, gqa.qkv_bias);
    attention_matrix(gqa.names.o, spec_.hidden, q, gqa.o_bias);
    if (gqa.norm == GqaSpec::Norm::kHead || gqa.norm == GqaSpec::Norm::kAll) {
      const bool head = gqa.norm == GqaSpec::Norm::kHead;
      attention_norm(gqa.names.q_norm, head ? gqa.head_dim : q);
      attention_norm(gqa.names.k_norm, head ? gqa.head_dim : kv);
    }
    close(at);
  }

  void add_mixer(const MlaSpec& mla) {
    const size_t at = open_attention(mla.names.o);
    const int64_t q = int64_t{mla.heads} * (mla.nope + mla.rotated);
    if (mla.q_rank > 0) {
      attention_matrix(mla.names.q_a, mla.q_rank, spec_.hidden, mla.bias);
      attention_norm(mla.names.q_a_norm, mla.q_rank);
      attention_matrix(mla.names.q_b, q, mla.q_rank, false);
    } else {
      attention_matrix(mla.names.q, q, spec_.hidden, false);
    }
    attention_matrix(mla.names.kv_a, mla.kv_rank + mla.rotated, spec_.hidden, mla.bias);
    attention_norm(mla.names.kv_a_norm, mla.kv_rank);
    exact_matrix(mla.names.kv_b, ModulePart::kAttention, int64_t{mla.heads} * (mla.nope + mla.v),
                 mla.kv_rank);
    attention_matrix(mla.names.o, spec_.hidden, int64_t{mla.heads} * mla.v, mla.bias);
    if (mla.indexer && !mla.indexer->shared) add_indexer(*mla.indexer, mla.q_rank);
    close(at);
  }

  void add_indexer(const IndexerSpec& indexer, int64_t q_rank) {
    const size_t at = open_attention(indexer.names.q, ModuleKind::kIndexer);
    attention_matrix(indexer.names.q, int64_t{indexer.heads} * indexer.dim, q_rank, false);
    attention_matrix(indexer.names.k, indexer.dim, spec_.hidden, false);
    add({.name = in_layer(indexer.names.k_norm),
         .kind = ModuleKind::kLayerNorm,
         .part = ModulePart::kAttention,
         .n = indexer.dim,
         .bias = true});
    exact_matrix(indexer.names.weights, ModulePart::kAttention, indexer.heads, spec_.hidden);
    close(at);
  }

  void add_mixer(const DeltaSpec& delta) {
    const DeltaSpec::Names& names = delta.names;
    const size_t at = open_attention(names.out, ModuleKind::kRecurrent);
    const DeltaShape& shape = delta.shape;
    const int64_t values = int64_t{shape.value_heads} * shape.value_dim, heads = shape.value_heads;
    attention_matrix(names.joined, shape.width() + (delta.mixed() ? values : 0), spec_.hidden, false);
    if (!delta.mixed()) attention_matrix(names.gates, values, spec_.hidden, false);
    exact_matrix(names.b, ModulePart::kAttention, names.a.empty() ? 2 * heads : heads, spec_.hidden);
    if (!names.a.empty()) exact_matrix(names.a, ModulePart::kAttention, heads, spec_.hidden);
    add({.name = in_layer(names.norm),
         .kind = ModuleKind::kGatedNorm,
         .part = ModulePart::kAttention,
         .n = shape.value_dim});
    attention_matrix(names.out, spec_.hidden, values, false);
    close(at);
  }

  // Of a dense layer or the shared expert, with its three matrices.
  void mlp(const std::string& name, ModulePart part, const std::array<std::string, 3>& matrices,
           int64_t inter, bool bias) {
    const size_t at = open({.name = name, .kind = ModuleKind::kMlp, .part = part});
    matrix(matrices[0], part, inter, spec_.hidden, bias);
    matrix(matrices[1], part, inter, spec_.hidden, bias);
    matrix(matrices[2], part, spec_.hidden, inter, bias);
    close(at);
  }

  void add_feed_forward(const DenseSpec& dense) {
    mlp(in_layer(parent_of(dense.names.gate)), ModulePart::kMlp,
        {in_layer(dense.names.gate), in_layer(dense.names.up), in_layer(dense.names.down)}, dense.inter,
        dense.bias);
  }

  // Where routed experts have a name of their own they are modules of the layer, as the router and the shared one.
  void add_feed_forward(const MoeSpec& moe) {
    if (!moe.names.experts.empty()) {
      add_router(moe);
      add_experts(moe, in_layer(moe.names.experts));
      add_shared(moe);
      return;
    }
    const std::string block = in_layer(moe.names.router.substr(0, moe.names.router.find('.')));
    const size_t at = open({.name = block, .kind = ModuleKind::kMoe, .part = ModulePart::kMoeBlock});
    add_router(moe);
    add_experts(moe, block + ".experts");
    add_shared(moe);
    close(at);
  }

  void add_router(const MoeSpec& moe) {
    add({.name = in_layer(moe.names.router),
         .kind = ModuleKind::kRouter,
         .part = ModulePart::kRouter,
         .n = moe.experts,
         .k = spec_.hidden,
         .bias = moe.router.bias,
         .exact = true});
  }

  void add_experts(const MoeSpec& moe, const std::string& name) {
    const size_t experts = open({.name = name,
                                 .kind = ModuleKind::kExperts,
                                 .part = ModulePart::kExperts,
                                 .n = moe.inter,
                                 .k = spec_.hidden,
                                 .count = moe.experts});
    for (int i = 0; i < moe.experts; ++i)
      add({.name = text("{}.{}", name, i),
           .kind = ModuleKind::kExpert,
           .part = ModulePart::kExperts,
           .expert = i});
    close(experts);
  }

  void add_shared(const MoeSpec& moe) {
    if (moe.shared_inter > 0) {
      const std::string shared = in_layer(moe.names.shared);
      mlp(shared, ModulePart::kShared, {shared + ".gate_proj", shared + ".up_proj", shared + ".down_proj"},
          moe.shared_inter, false);
      if (moe.shared_gate) exact_matrix(moe.names.shared_gate, ModulePart::kShared, 1, spec_.hidden);
    }
    if (moe.apart)
      for (const std::string& name :
           {moe.apart->routed_norm, moe.apart->routed_out_norm, moe.apart->shared_out_norm})
        norm(in_layer(name), ModulePart::kNorms, spec_.hidden);
  }

  const ModelSpec& spec_;
  ModuleTree tree_;
  int layer_ = -1;
};

std::string_view own_word(const ModuleTree& tree, const SameWords& group) {
  for (const ModelModule& module : tree.modules) {
    if (module.layer < 0 || group.of_routers != (module.kind == ModuleKind::kRouter)) continue;
    for (const std::string_view word : group.words)
      if (find_components(module.name, word, group.of_routers) != std::string_view::npos) return word;
  }
  return {};
}

}  // namespace

std::string_view name_of(ModulePart part) {
  constexpr std::string_view kNames[] = {
      "model",  "embedding", "rotary embedding", "layer",          "norms",      "attention", "expert block",
      "router", "dense MLP", "shared expert",    "routed experts", "final norm", "head"};
  return kNames[static_cast<size_t>(part)];
}

ModuleSpelling ModuleTree::spelling_of(std::string_view pattern) const {
  ModuleSpelling out;
  for (size_t i = 0; i < own_words.size(); ++i) {
    if (own_words[i].empty() || has_word(pattern, own_words[i])) continue;
    for (const std::string_view word : same_words()[i].words) {
      if (!has_word(pattern, word)) continue;
      out.emplace_back(own_words[i], word);
      break;
    }
  }
  return out;
}

std::string spelled(const ModelModule& module, const ModuleSpelling& spelling) {
  std::string name = module.name;
  for (const auto& [own, other] : spelling) {
    const bool router = own == "gate" || own.starts_with("router");
    if (router && module.kind != ModuleKind::kRouter) continue;
    const size_t at = find_components(name, own, router);
    if (at != std::string::npos) name.replace(at, own.size(), other);
  }
  return name;
}

ModuleTree module_tree(const ModelSpec& spec) {
  ModuleTree tree = TreeBuilder(spec).build();
  find_own_words(tree);
  return tree;
}

void find_own_words(ModuleTree& tree) {
  for (const SameWords& group : same_words()) tree.own_words.emplace_back(own_word(tree, group));
}

void add_stored_formats(ModuleTree& tree, const Checkpoint& checkpoint, const ExpertSource* experts) {
  std::map<std::string, LinearModule, std::less<>> linears;
  for (LinearModule& each :
       find_linears(checkpoint, [&](std::string_view name) { return experts && experts->owns(name); })) {
    std::string name = each.module;
    linears.emplace(std::move(name), std::move(each));
  }
  std::set<int> layers;
  if (experts)
    for (const int layer : experts->layers()) layers.insert(layer);
  std::vector<Format> of_experts, of_embedding;
  const auto linear = [&](const std::string& name) -> std::vector<Format> {
    for (const char* outer : {"", "language_model.", "model.language_model."}) {
      // A model inside a larger one has its names behind another prefix.
      const std::string inner = *outer == 'm' && name.starts_with("model.") ? name.substr(6) : name;
      const auto found = linears.find(linear_name(checkpoint, outer + inner));
      if (found != linears.end()) return {open_linear(checkpoint, found->second)->format};
    }
    return {};
  };
  for (ModelModule& module : tree.modules) {
    if (module.kind == ModuleKind::kLinear || module.kind == ModuleKind::kRouter ||
        module.kind == ModuleKind::kEmbedding)
      module.formats = linear(module.name);
    if (module.kind == ModuleKind::kEmbedding) of_embedding = module.formats;
    if (module.part == ModulePart::kHead && module.formats.empty()) module.formats = of_embedding;  // tied
    if (module.kind == ModuleKind::kExperts) {
      of_experts.clear();
      if (layers.contains(module.layer))
        for (const Projection projection : kProjections)
          of_experts.push_back(experts->at(module.layer, 0, projection)->format);
    }
    if (module.part == ModulePart::kExperts) module.formats = of_experts;
    if (module.formats.empty()) continue;
    const std::string first = name_of(module.formats.front()), last = name_of(module.formats.back());
    module.stored = first == last ? first : text("{} and {}", first, last);
  }
}

}  // namespace kt::inline models
