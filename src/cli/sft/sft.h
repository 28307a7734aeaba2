// The verbs below `kt sft`, each in a file of its own.
#pragma once
#include "cli/verbs.h"

namespace kt::inline cli {

void add_sft_train(CLI::App& sft, Invocation& run);
void add_sft_chat(CLI::App& sft, Invocation& run);
void add_sft_api(CLI::App& sft, Invocation& run);
void add_sft_eval(CLI::App& sft, Invocation& run);
void add_sft_export(CLI::App& sft, Invocation& run);
void add_sft_keys(CLI::App& sft, Invocation& run);

}  // namespace kt::inline cli
