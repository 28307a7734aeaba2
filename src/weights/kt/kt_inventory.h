// Which kt weights there are: every array found in files of either style, checked to be a whole model.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weights/config.h"
#include "weights/kt/kt_arrays.h"

namespace kt::inline weights {

struct KtEntry {
  KtName name;
  uint64_t bytes = 0;
};
// Layer, expert, projection, forward before backward, part, weight before scale: the order of files.
bool in_file_order(const KtName& a, const KtName& b);

// What something beside the arrays says about them; 0: nothing.
struct KtClaims {
  int bits = 0, parts = 0;
  int64_t hidden = 0, inter = 0;
};

struct KtInventory {
  KtModel model;  // rounding, source and tool are empty
  std::vector<int> layers;
  int experts = 0;
};

// `entries` in file order, each name once. Sizes follow from the claims, else from the config, else from the
// scales; all must agree with the bytes. Every layer must have all experts, parts and projections, and where
// the config knows, every layer it calls a MoE layer must be there. One line says what is not so, naming
// `path`.
KtInventory take_inventory(std::string_view path, std::span<const KtEntry> entries, const KtClaims& claims,
                           const ModelConfig& config);

}  // namespace kt::inline weights
