// Flags of every verb that can give a model to a GPU.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "cli/verbs.h"
#include "engine/gpu_choice.h"

namespace kt::inline cli {

class Settings;

inline constexpr std::string_view kUsualGpu = "auto";

struct GpuUseFlags {
  std::string device{kUsualGpu};  // of --gpu
  std::string memory, experts = "auto", placement, statistics;
  std::string prefill_from = "auto";
  int prefill_chunk = 0;
  double experts_ratio = -1;  // below 0: not given
  double share = 0;           // of --mem-fraction-static

  void add_to(CLI::App& verb);
  // What `verb`'s command line leaves open.
  void take(const Settings& settings, const CLI::App& verb);
  GpuChoice choice() const;
  PlacementOptions placement_options() const;
  // Options that mean nothing where no GPU is used: all but --gpu.
  const std::vector<const CLI::Option*>& options() const { return options_; }
  // "--gpu-memory, --gpu-experts": those of them that were given.
  std::string given() const;

 private:
  const CLI::Option* gpu_ = nullptr;
  std::vector<const CLI::Option*> options_;
};

// What is wrong with a value as settings have it; "": nothing.
std::string gpu_problem(std::string_view value);
std::string gpu_experts_problem(std::string_view value);
std::string expert_placement_problem(std::string_view value);
std::string prefill_threshold_problem(std::string_view value);

}  // namespace kt::inline cli
