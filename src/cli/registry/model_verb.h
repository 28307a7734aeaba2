// What `kt model` and its sub-verbs share.
#pragma once
#include <nlohmann/json.hpp>

#include "cli/registry/model_files.h"
#include "cli/registry/registry.h"
#include "cli/verbs.h"

namespace kt::inline cli {

ModelEntry entry_of(const std::string& name, const ModelFiles& files);
// The path of weights that a model is to be linked to. Error unless they are of this model: others would load and
// answer nonsense. `flag` is what the error calls them.
std::string checked_link(const ModelFiles& model, const std::string& path, const char* flag);
std::string experts_text(int active, int experts);  // "8 of 128"; "-" for a dense model
// One line of JSON or many; bytes of paths that are no UTF-8 are replaced.
void print_model_json(const nlohmann::ordered_json& value);

// The registered model of this name; Error naming those that there are.
ModelEntry entry_named(const std::string& name);

void add_model_scan(CLI::App& model, Invocation& run);
void add_model_edit(CLI::App& model, Invocation& run);
void add_model_download(CLI::App& model, Invocation& run);
void add_model_verify(CLI::App& model, Invocation& run);  // and verify-all
void add_model_upkeep(CLI::App& model, Invocation& run);

}  // namespace kt::inline cli
