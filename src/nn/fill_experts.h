// All experts of a layer, read and packed on the workers of a pool. Where they come from is the caller's business.
#pragma once
#include <functional>
#include <span>
#include <string>

#include "base/function_ref.h"
#include "base/pool.h"
#include "nn/experts.h"

namespace kt::inline nn {

struct ExpertsFill {
  std::string name = {};  // of the layer, for errors
  int experts = 0;        // that there are
  // Opens an expert for as long as `use` takes; from several threads.
  std::function<void(int expert, FunctionRef<void(const ExpertRows&)> use)> load = {};
  // Many experts go one to a worker. Few large ones would leave workers without: all share each of them.
  bool together = false;
};

// Each worker holds a piece of an expert in plain order while it packs it. The first error stops all and is
// thrown; the layer is then part loaded. With a map, expert i of `into` is map[i] of the fill, which may be there
// more than once: one number in [0, fill.experts) for each expert of `into`.
void fill_experts(Pool& pool, const ExpertsFill& fill, Experts& into, std::span<const int64_t> map = {});

}  // namespace kt::inline nn
