// Any bytes as a file of placement rules, matched against a tree of any family: an Error of one line that names the
// file, or a rule or none for every module, and for every rule either modules or a reason.
#include <cstdlib>
#include <set>
#include <string>

#include "base/error.h"
#include "models/families.h"
#include "models/placed_rules.h"

namespace {

const kt::ModuleTree& tree_of(size_t number) {
  static const std::vector<kt::ModuleTree> trees = [] {
    std::vector<kt::ModuleTree> out;
    for (const char* type :
         {"deepseek_v2", "deepseek_v3", "qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "llama", "hy_v3"}) {
      const kt::Json config = {{"model_type", type},
                               {"vocab_size", 100},
                               {"hidden_size", 64},
                               {"intermediate_size", 96},
                               {"moe_intermediate_size", 32},
                               {"num_hidden_layers", 2},
                               {"num_attention_heads", 4},
                               {"num_key_value_heads", 2},
                               {"head_dim", 32},
                               {"kv_lora_rank", 32},
                               {"qk_nope_head_dim", 16},
                               {"qk_rope_head_dim", 16},
                               {"v_head_dim", 16},
                               {"n_shared_experts", 1},
                               {"num_shared_experts", 1},
                               {"n_routed_experts", type[0] == 'd' ? kt::Json(4) : kt::Json()},
                               {"num_experts", 4},
                               {"num_local_experts", 4},
                               {"first_k_dense_replace", 1},
                               {"num_experts_per_tok", 2},
                               {"shared_expert_intermediate_size", 80},
                               {"max_position_embeddings", 1024},
                               {"tie_word_embeddings", false}};
      try {
        out.push_back(kt::module_tree(kt::describe_model(config, "config")));
      } catch (const kt::Error&) {  // a family that wants more of a config; the others do
      }
    }
    return out;
  }();
  if (trees.size() < 4) std::abort();
  return trees[number % trees.size()];
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const kt::ModuleTree& tree = tree_of(size);
  try {
    const kt::RuleFile file = kt::parse_rules({reinterpret_cast<const char*>(data), size}, "input");
    const kt::RuleMatches found = kt::match_rules(file, tree);
    if (found.rule.size() != tree.modules.size()) std::abort();
    const std::set<int> busy(found.rule.begin(), found.rule.end());
    size_t deciding = 0;
    for (const int rule : busy) deciding += rule >= 0;
    if (deciding + found.idle.size() != file.rules.size()) std::abort();
    const kt::PlacedRules placed = kt::place_by_rules(file, tree, {});
    if (kt::describe(placed, false).empty() || kt::json_of(placed, true).dump().empty()) std::abort();
  } catch (const kt::Error& error) {
    const std::string line = error.what();
    if (!line.starts_with("input:") || line.find('\n') != line.npos || line.size() > 2000) std::abort();
  }
  return 0;
}
