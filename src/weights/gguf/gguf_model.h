// What a GGUF file says beyond names and sizes that config.json would say too, so that a file by itself is a
// model: dimensions of heads, rotation, biases, tied embeddings, tokens that end a turn. Told by metadata
// where it has a key, else by the tensors that are there, else by what the public converter leaves unsaid.
#pragma once
#include <functional>
#include <string_view>

#include "text/json.h"
#include "weights/gguf/gguf.h"

namespace kt {

using TensorFinder = std::function<const Tensor*(std::string_view name)>;

// Adds to what gguf_config made. Does nothing for architectures of which there is no gguf_family(). Never
// fails: a value that cannot be is left for who needs it to refuse.
void add_gguf_model_facts(const GgufHeader& header, const TensorFinder& find, Json& config);

}  // namespace kt
