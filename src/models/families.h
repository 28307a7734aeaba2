// The model families that can run. One file each; the table is in families.cc.
#pragma once
#include <string_view>

#include "models/spec.h"
#include "text/json.h"
#include "weights/checkpoint.h"

namespace kt::inline models {

// What GGUF files of these families have of their own: for Checkpoint and open_experts, which read such
// files.
GgufFamilies gguf_families();

// Whether a family of that model_type can run.
bool runs_family(std::string_view model_type);

// The spec of a config.json, or Error(kUnsupported) listing the known architectures. `name` is for messages.
// key_names: see weights/config.h.
ModelSpec describe_model(const Json& config, std::string_view name, const KeyNames& key_names = {});
// That of a checkpoint; for GGUF files the error lists the architectures as such files call them.
ModelSpec describe_model(const Checkpoint& checkpoint);

}  // namespace kt::inline models
