// What the parts of ExpertLayer share: calls in expert_layer.cc, streams in expert_layer_stream.cc, loading
// in expert_layer_load.cc, write-back in expert_layer_write.cc.
#pragma once
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "hybrid/expert_layer.h"
#include "hybrid/layer_model.h"

namespace kt::inline hybrid {

// The pairs of one forward, cut by split_deferred(): [tokens, top_k] each, -1 where the other has it.
struct DeferredPairs {
  std::vector<int64_t> now, later;
};

// Streams and captured graphs hold it too: it lives until the last work that uses it was enqueued, done and
// collected, whatever became of the ExpertLayer.
struct ExpertLayer::State {
  std::shared_ptr<CpuTeam> team;
  ExpertLayerOptions options;
  const WeightMethod* method = nullptr;
  LayerSlot model_slot;
  std::optional<Experts> experts;  // from load() or load_values() on
  std::vector<int64_t> map;        // physical to logical, as loaded
  // What load() read, kept open for the layers that are loaded next.
  std::shared_ptr<const ExpertSource> source;
  // Held shared by whoever uses `experts`, exclusively while another load() replaces them.
  mutable std::shared_mutex in_use;

  std::mutex mask_mutex;          // whoever replaces the mask waits for readers of the old one
  const uint8_t* mask = nullptr;  // [experts] of the caller, or own_mask's
  std::vector<uint8_t> own_mask;  // what the mask was when the ExpertLayer ended

  // The first that failed since it was asked for.
  struct Failure {
    std::mutex mutex;
    std::exception_ptr first;
    std::atomic<bool> any = false;

    void keep(std::exception_ptr what) noexcept;
    void rethrow();  // what was kept, if anything
  };
  Failure forwards, writes;              // of work in flight; of submit_write()
  std::atomic<uint64_t> last_write = 0;  // its ticket

  State(std::shared_ptr<CpuTeam> with, ExpertLayerOptions how);

  // Error for what is wrong with a call whatever memory it points to, and before weights are loaded.
  void check_call(const LayerCall& call) const;
  // output = the experts' sum, + carry ([tokens, hidden] or null). With `pairs`, of the pairs that are not
  // deferred; the others are left in pairs->later for run_deferred(). Host memory; any thread, several at a
  // time.
  void run(const LayerCall& call, void* output, const float* carry, DeferredPairs* pairs);
  // sums [tokens, hidden] = the experts' sum of the pairs that run() deferred.
  void run_deferred(const LayerCall& call, const DeferredPairs& pairs, float* sums) const;

  // In the team's order, after what was submitted; returns when it is done. An empty map is 0, 1, 2 ...
  void replace(Experts loaded, std::span<const int64_t> physical_to_logical,
               std::shared_ptr<const ExpertSource> from);

  // What training calls give to the experts, checked; the output is for the caller to name.
  ForwardArgs train_args(const LayerCall& call, std::vector<uint8_t>& mask_bytes);

 private:
  const uint8_t* read_mask(std::vector<uint8_t>& bytes);
  void check_weights(const LayerCall& call, const uint8_t* skip) const;
  void split(const LayerCall& call, const uint8_t* skip, DeferredPairs& pairs) const;
  void forward_adding(ForwardArgs args, const float* carry) const;
};

size_t size_of_real(Real type);
ForwardArgs forward_args(const LayerCall& call, void* output, Real output_type);

// What a layer deferred is dropped: no later layer of its model followed with as many tokens. Logged once.
void warn_of_dropped(int layer);

}  // namespace kt::inline hybrid
