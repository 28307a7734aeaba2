// The names of a model's tensors in GGUF files and in the checkpoint they were made from: one table, read
// both ways. Names only; what a conversion does to the numbers is linears.cc's affair.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "weights/checkpoint.h"
#include "weights/experts.h"

namespace kt {

// A family whose GGUF files are whole models.
struct GgufFamily {
  std::string_view gguf;          // general.architecture
  std::string_view model_type;    // of config.json
  std::string_view architecture;  // of config.json
  bool interleaved = false;       // rows of q and k are stored for rotation of neighbours
};
// By model_type, the word the rest of the code has; null for any other.
const GgufFamily* gguf_family(std::string_view model_type);
std::string known_gguf_architectures();  // "deepseek2, glm4moe, ..."

// "blk.3.attn_q.weight" for "model.layers.3.self_attn.q_proj.weight"; nothing for a name without a row.
std::optional<std::string> gguf_name(std::string_view model_type, std::string_view published);
// The way back.
std::optional<std::string> published_name(std::string_view model_type, std::string_view gguf);
// "model.layers.3.mlp.experts.7.gate_proj", or as the family spells it.
std::string published_expert(std::string_view model_type, int layer, int expert, Projection projection);

// What the checkpoint calls a tensor that is asked for by its published name: the same but in GGUF files.
std::string stored_name(const Checkpoint& checkpoint, std::string_view published);

}  // namespace kt
