// The metadata of a GGUF file in the words of config.json, so that one reader serves both.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

#include "text/json.h"
#include "weights/config.h"
#include "weights/gguf/gguf_family.h"

namespace kt::inline weights {

// Keys that the metadata has, under the names the family uses in config.json; values that are lists, one
// number a layer, are taken where all are equal and left out otherwise. An empty object without
// general.architecture. Without a family, model_type is the file's own word. Error naming the file and its key
// for a value of the wrong kind, negative or not finite.
Json gguf_config(const GgufHeader& header, const GgufFamily* family = nullptr);

inline constexpr uint64_t kGgufSigmoid = 2;  // of expert_gating_func

// The file's own words for keys of that config, for errors: "qwen3moe.block_count" for "num_hidden_layers".
KeyNames gguf_key_names(const GgufHeader& header);

// Whether what this tensor says is part of the config: numbers that frequencies are divided by.
bool is_gguf_config_tensor(std::string_view name);

// Values of the metadata, whatever their type in the file; nothing where absent. Error naming the file and the
// key for one that is not a whole number from 0 to INT64_MAX, not a finite number, not UTF-8.
std::optional<uint64_t> gguf_unsigned(const GgufHeader& header, std::string_view key);
// An array of flags; empty where there is none.
std::vector<bool> gguf_flags(const GgufHeader& header, std::string_view key);
// `count` whole numbers of at least 0, or one that stands for all; empty where there is none.
std::vector<uint64_t> gguf_counts(const GgufHeader& header, std::string_view key, uint64_t count);
std::optional<double> gguf_real(const GgufHeader& header, std::string_view key);
std::string_view gguf_string(const GgufHeader& header, std::string_view key);  // empty where absent
// A token's id: one below `tokens`.
std::optional<uint64_t> gguf_token_id(const GgufHeader& header, std::string_view key, uint64_t tokens);

}  // namespace kt::inline weights
