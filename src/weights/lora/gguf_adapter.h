// A folder's adapter as one GGUF file that llama.cpp reads: general.type "adapter", adapter.type "lora", and for each
// matrix of the model "<its tensor>.lora_a" [rank, in] and ".lora_b" [out, rank], those of a layer's experts stacked
// ("blk.3.ffn_up_exps.weight.lora_a" [experts, rank, in]). In f32.
//
// What files of a family store in another order than the published checkpoint has its factors in that order: rows of q
// and k reordered for the rotation of neighbours, kv_b in its two halves, with keys' transposed ((B A)^T = A^T B^T,
// head by head). One alpha serves the file; where a matrix has another one, its B is multiplied by what it differs by.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "weights/checkpoint.h"
#include "weights/lora/lora_file.h"

namespace kt::inline weights {

struct GgufAdapterExport {
  const LoraFile* adapter = nullptr;  // a folder's
  const Checkpoint* model = nullptr;  // the one it belongs to: published, or a GGUF file
  std::string to;                     // "....gguf"
  bool overwrite = false;
};

struct GgufAdapterWritten {
  std::string architecture;
  int layers = 0, experts = 0, matrices = 0;  // layers with LoRA on experts; pairs of all kinds
  uint64_t bytes = 0;
  // Tensors that llama.cpp reads and does nothing with: of latent attention it multiplies all but the output without
  // adapters (as of August 2026).
  std::vector<std::string> unused = {};
};

// The file appears whole or not at all. Errors: a model whose GGUF files are not known; factors that fit no matrix of
// it, or one that is stored in a form which takes none (recurrent layers, gate and up in turns): named; a file that is
// there, unless it may be overwritten.
GgufAdapterWritten export_gguf_adapter(const GgufAdapterExport& request);

}  // namespace kt::inline weights
