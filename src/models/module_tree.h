// The modules of a model as a tree of names, made from its spec alone: what placement rules match. Names are those of
// the published checkpoint; a module answers to its other spellings too (block_sparse_moe for mlp, w1 for gate_proj).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/spec.h"
#include "weights/checkpoint.h"
#include "weights/experts.h"

namespace kt::inline models {

enum class ModuleKind : uint8_t {
  kModel,    // the whole, whose name is empty
  kDecoder,  // "model"
  kEmbedding,
  kList,  // of layers
  kLayer,
  kAttention,
  kRecurrent,  // in its place: the gated delta rule
  kIndexer,    // of attention: what chooses its keys
  kMoe,
  kMlp,  // of a dense layer, and the shared expert
  kRouter,
  kExperts,  // the routed ones of a layer
  kExpert,   // one of them
  kLinear,
  kNorm,
  kGatedNorm,  // of the gated delta rule
  kLayerNorm,  // with a bias: of an indexer
  kRotary,
  kOther,  // of a given tree: what rules know no name for
};

// What a module belongs to, as plans are printed.
enum class ModulePart : uint8_t {
  kWhole,
  kEmbedding,
  kRotary,
  kLayer,
  kNorms,
  kAttention,
  kMoeBlock,
  kRouter,
  kMlp,
  kShared,
  kExperts,
  kFinalNorm,
  kHead
};
std::string_view name_of(ModulePart part);  // "attention", "routed experts"

struct ModelModule {
  std::string name;
  ModuleKind kind = ModuleKind::kModel;
  ModulePart part = ModulePart::kWhole;
  int layer = -1, expert = -1;
  // Of its weight: a matrix, or a vector of n; of routed experts the gate's and the up's. 0: it has none of its own.
  int64_t n = 0, k = 0;
  bool bias = false;
  bool exact = false;  // a matrix that nothing rounds: close scores are compared, or it runs as others
  int64_t count = 0;   // of routed experts: how many
  size_t end = 0;      // behind the last module below, among the tree's
  std::string stored =
      {};  // the format its matrix has in the checkpoint, or those its experts have; "": not known
  std::vector<Format> formats =
      {};  // the same: of its matrix, or of its experts' gate, up and down; none: not known
  // Of a given tree: words of its class and of those that it is derived from. Rules that name one match it.
  std::vector<std::string> classes = {};
};

// The way one text spells names: components of the tree's names and what stands there instead.
using ModuleSpelling = std::vector<std::pair<std::string, std::string>>;

struct ModuleTree {
  std::string family;
  std::vector<ModelModule> modules = {};    // depth first; children in the order of computing
  std::vector<std::string> own_words = {};  // of each group of words that mean the same, its own; "": none

  // The spelling that a pattern uses: for words of which it has none of the tree's, and another that means the same.
  ModuleSpelling spelling_of(std::string_view pattern) const;
};
std::string spelled(const ModelModule& module, const ModuleSpelling& spelling);

ModuleTree module_tree(const ModelSpec& spec);
void find_own_words(ModuleTree& tree);  // fills in own_words, from the names
// Fills in ModelModule::stored and formats, from headers. Null: no routed experts.
void add_stored_formats(ModuleTree& tree, const Checkpoint& checkpoint, const ExpertSource* experts);

}  // namespace kt::inline models
