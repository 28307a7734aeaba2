// What `kt quant` and its sub-verbs share.
#pragma once
#include <string>

#include "cli/verbs.h"
#include "weights/plans/compressed_plan.h"
#include "weights/plans/conversion.h"

namespace kt::inline cli {

// Flags of how a conversion runs, the same in every verb that converts.
struct RunFlags {
  int threads = 0, resume_layer = -1;
  std::string max_memory, memory_flag = "--max-memory";
  bool resume = false, overwrite = false, json = false;
  void add_to(CLI::App& verb);
  uint64_t memory() const;  // 0: no bound
};

// plan_compressed, and for a GGUF source the tokenizer files its metadata holds.
ConversionPlan plan_model(const Checkpoint& checkpoint, const ExpertSource* source,
                          const CompressedPlanOptions& options);

// Experts that are no plain floats lose a second time.
void warn_if_rounded(const ExpertSource& source, std::string_view to);

// Runs the plan with a progress bar.
ConversionResult convert(const ConversionPlan& plan, const RunFlags& flags);
// And prints the figures.
void convert_and_report(const ConversionPlan& plan, const RunFlags& flags);

void add_quant_gpu(CLI::App& quant, Invocation& run);
void add_quant_merge(CLI::App& quant, Invocation& run);
void add_quant_compare(CLI::App& quant, Invocation& run);
void add_quant_dequant(CLI::App& quant, Invocation& run);
void add_quant_dataset(CLI::App& quant, Invocation& run);

}  // namespace kt::inline cli
