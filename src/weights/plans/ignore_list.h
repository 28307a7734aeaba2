// Which modules a quantisation leaves alone, and how config.json says so: the `ignore` list that
// compressed_tensors, transformers and vLLM match against the names of their own modules.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/regex.h"

namespace kt::inline weights {

// The caller's patterns: "re:REGEX" matched from the start of a module's name, as Python's re.match does, or
// a name or part of one. Error naming a pattern that is no regular expression, or one that takes too many
// steps on a name.
class ModulePatterns {
 public:
  explicit ModulePatterns(const std::vector<std::string>& patterns);
  bool match(std::string_view module) const;
  // As given, those that match none of the modules.
  std::vector<std::string> idle(const std::vector<std::string>& modules) const;

 private:
  struct Pattern {
    std::string source;  // as given
    std::optional<Regex> expression = {};
    bool match(std::string_view module) const;
  };
  std::vector<Pattern> patterns_;
};

// Never quantised, by the name alone: embeddings, norms, output heads, routers and gates of shared experts,
// vision and audio parts, multi-token-prediction blocks.
bool never_quantised(std::string_view module);
// The layer's number in "model.layers.12.mlp..."; -1 where the name has none or belongs to a
// multi-token-prediction block or a vision or audio part.
int layer_of(std::string_view module);

// The `ignore` list for a model in which exactly `kept` of all Linears stay as they are. Entries name layers
// and experts by \d+ and match whatever stands before "layers." (loaders rename that), unless such an entry
// would also match one of `quantised`: then the module's own name stands there. Layers from `layers` on
// (multi-token prediction) are one entry each.
std::vector<std::string> ignore_entries(const std::vector<std::string>& kept,
                                        const std::vector<std::string>& quantised, int layers);

}  // namespace kt::inline weights
