// The metadata of a GGUF file in the words of config.json, so that one reader serves both.
#pragma once
#include <optional>
#include <string_view>

#include "text/json.h"
#include "weights/gguf/gguf_family.h"

namespace kt {

// Keys that the metadata has, under the names the family uses in config.json; values that are lists, one
// number a layer, are taken where all are equal and left out otherwise. An empty object without
// general.architecture. Without a family, model_type is the file's own word.
Json gguf_config(const GgufHeader& header, const GgufFamily* family = nullptr);

inline constexpr uint64_t kGgufSigmoid = 2;  // of expert_gating_func

// A number of the metadata, whatever its type in the file; nothing if absent or not a whole number >= 0.
std::optional<uint64_t> gguf_unsigned(const GgufHeader& header, std::string_view key);
// A string of the metadata; empty if absent or not a string.
std::string_view gguf_string(const GgufHeader& header, std::string_view key);

}  // namespace kt
