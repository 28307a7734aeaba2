// What calls over experts have in a workspace, and the forward that plain and training calls share; not for other
// files than those of the forward and the backward.
#pragma once
#include "nn/experts_backward_node.h"
#include "nn/experts_forward_node.h"
#include "nn/kept_memory.h"

namespace kt::inline nn {

struct Workspace::State {
  std::mutex mutex;  // held while a call runs
  ExpertRouting routing;
  std::vector<std::unique_ptr<ForwardNode>> nodes;
  std::vector<std::unique_ptr<BackwardNode>> backward;
  std::shared_ptr<KeptMemory> kept = std::make_shared<KeptMemory>();
};

// Errors of what the caller gave, named after `call`. The output apart, which a backward does not have.
void check_call(const Experts::State& experts, const ForwardArgs& args, std::string_view call);
void check_output(const Experts::State& experts, const ForwardArgs& args, std::string_view call);

bool on_one_node(const Experts::State& experts);  // whether one node has all of `inter`

// How a forward runs over the routing that its workspace holds.
struct ForwardRun {
  const ForwardArgs* args = nullptr;
  Precision precision = Precision::kDefault;
  std::vector<NodeForward::Keep> keep = {};  // of each node; empty: nothing is kept
  bool keeps_only = false;
};
void run_forward(const Experts::State& experts, Workspace::State& space, const ForwardRun& run);

}  // namespace kt::inline nn
