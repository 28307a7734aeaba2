// The routed experts of one layer for an engine that is not ours: which of them the CPU computes, from which
// weights, in which stream's order, and what is deferred to the next layer. The arithmetic is nn/experts.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "hybrid/cpu_team.h"
#include "nn/experts_grad.h"
#include "weights/weight_method.h"

namespace kt::inline hybrid {

struct ExpertLayerOptions {
  int layer = 0;
  ExpertsShape shape = {};
  int top_k = 0;
  std::string method = "AMXINT4";
  std::string weights = {};  // path; needed by load() and where values are saved
  std::string model = {};    // layers of one name are of one model; empty: as layer_model.h tells
  int max_tokens = 512;      // of one forward; more is an Error
  int max_deferred = 0;      // experts per token that may be deferred to the next layer
  int group_size = 128;
  bool zero_point = true;
  bool save = false;  // load_values() writes kt weights under `weights`
  Activation activation = {};
  Precision precision = Precision::kDefault;
};

// Values of all experts of a layer, row-major; gate and up [experts, inter, hidden], down [experts, hidden,
// inter].
struct ExpertValues {
  const void* gate = nullptr;
  const void* up = nullptr;
  const void* down = nullptr;
  Real type = Real::kBf16;
};

// Weights of all experts as checkpoints store them (expert_codes.h has the layouts): host addresses, one
// for each expert, or one for all of them where they stand one after the other.
struct ExpertCodes {
  struct Side {
    std::vector<const void*> codes = {}, scales = {};  // scales: empty where the method has none
    uint32_t gguf_type = 0;  // with LLAMAFILE: the number that GGUF has for the type
  };
  Side gate, up, down;
};

// One forward. Pointers are to host memory in forward(), to memory of any kind in submit().
struct LayerCall {
  int tokens = 0, top_k = 0;
  const void* input = nullptr;  // [tokens, hidden], rows `input_stride` elements apart (0: hidden)
  Real input_type = Real::kBf16;
  int64_t input_stride = 0;
  const void* ids = nullptr;  // [tokens, top_k] contiguous, int32 or int64
  bool ids_are_64_bit = false;
  const float* weights = nullptr;  // [tokens, top_k] contiguous
  bool adds = false;               // forward() alone: to what the output holds
};

// What a backward is given and where its results go: host memory, without gaps.
struct LayerBackward {
  const SavedCall* saved = nullptr;   // of the forward; null or empty: it is computed again
  const void* output_grad = nullptr;  // [tokens, hidden]
  Real output_grad_type = Real::kBf16;
  float* input_grad = nullptr;    // [tokens, hidden], or null: not wanted
  float* weights_grad = nullptr;  // [tokens, top_k] or null
  ExpertLoraGrads lora_grads;     // added to
};

// Host addresses of one rank's buffers, for write_expert.
struct ExpertBuffers {
  void* w13 = nullptr;
  void* w13_scale = nullptr;
  void* w2 = nullptr;
  void* w2_scale = nullptr;
};

class ExpertLayer {
 public:
  ExpertLayer(std::shared_ptr<CpuTeam> team, ExpertLayerOptions options);
  // Work in flight goes on: what it needs lives until it is done, with the mask as it is now, and is given
  // back by later calls of other layers or release_buffers(). Captured graphs keep it while they live. In a
  // forked child all calls throw, and only the memory is given back.
  ~ExpertLayer();
  ExpertLayer(const ExpertLayer&) = delete;
  ExpertLayer& operator=(const ExpertLayer&) = delete;

  // Slot p gets logical expert map[p]; an empty map is 0, 1, 2 ... Errors name map entries and files. Replaces
  // weights after what was submitted, in a task of the team at once.
  void load(std::span<const int64_t> physical_to_logical);
  void load_values(const ExpertValues& values, std::span<const int64_t> physical_to_logical);
  void load_codes(const ExpertCodes& codes, std::span<const int64_t> physical_to_logical);
  bool loaded() const;

  // [experts] bytes, nonzero: computed elsewhere. Read by each forward, replayed ones too; the caller may
  // change them at any time and keeps them until the next set_mask() or the end of the layer. Null: the CPU
  // has all.
  void set_mask(const uint8_t* mask);

  // At once, on the calling thread and the team's workers; several threads may call. output: [tokens,
  // hidden], type of the input, contiguous. What is deferred is added to the output of the next forward of
  // this model (layer_model.h) in the same thread, if its layer is a later one and has as many tokens; else
  // dropped. A NaN weight of a pair that is computed here is an Error; ids that do not exist are
  // skipped.
  void forward(const LayerCall& call, void* output);

  // Training, at once and on host memory (experts_grad.h has the formulas and what gradients are): a forward whose
  // result has the bits of the plain one with these factors beside the weights, and its backward, to which call and
  // factors are given again. Several threads may call. Nothing is deferred, and what others deferred is left alone. The
  // mask is read at each call, but a backward of what was saved goes by the mask of its forward.
  void train_forward(const LayerCall& call, void* output, const ExpertLora& lora, SavedCall* keep);
  void train_backward(const LayerCall& call, const ExpertLora& lora, const LayerBackward& back);

  // In the order of a stream. When submit() returns, the copies of input, ids and weights to the host are in
  // the stream; the caller may overwrite them by later work of that stream. sync() makes the stream wait for
  // the CPU and copy the result to `output` (device memory, contiguous, type of the input). Both may be
  // captured into a graph; what a graph uses lives as long as it, and until the next release_buffers().
  // Errors of the CPU's work are thrown by a later call of this layer or of check(); the output is then
  // zeros. Needs cuda_driver(). One submit may be followed by other layers' before its sync, which is on the
  // same stream (handle 2, the default stream of a thread: in the same thread too); a second submit of the
  // same layer gives up the first. Rows of the input stand without gaps. What is deferred goes to the next
  // layer as in forward(), by the thread that submits; a graph decides it when it is captured. In a graph
  // that has no sync for it the next replay waits for the CPU: it writes to the same memory.
  void submit(const LayerCall& call, CudaStream stream);
  void sync(void* output, int tokens, CudaStream stream);

  // Throws the first error of work in flight since the last call.
  void check();

  // The weights of a slot, cut for `ranks` tensor-parallel ranks, in the layout that GPU code reads for this
  // method (docs/python.md has the table). Runs on the team after what was submitted; in a task
  // of the team at once, and its errors are thrown there. sync_write() waits for those of this layer and throws
  // the first error of any of them: neither other layers' nor forwards' errors.
  void submit_write(int expert, std::span<const ExpertBuffers> ranks);
  void sync_write();
  size_t w13_bytes(int ranks) const, w13_scale_bytes(int ranks) const, w2_bytes(int ranks) const,
      w2_scale_bytes(int ranks) const;  // of one expert and rank

  const ExpertLayerOptions& options() const;
  const Experts& experts() const;
  CpuTeam& team() const;

  struct State;  // expert_layer_state.h

 private:
  std::shared_ptr<State> state_;
};

// Which (token, slot) pairs are computed now and which later: the top_k - max_deferred heaviest experts of
// each token are protected; a pair whose expert is protected by any token of the batch is computed now. ids
// that are computed now stay in `now` and are -1 in `later`, and the other way round. Ties go to the earlier
// slot.
void split_deferred(std::span<const int64_t> ids, std::span<const float> weights, int top_k, int max_deferred,
                    int experts, std::span<int64_t> now, std::span<int64_t> later);

// Gives back the buffers of streams, only when no work is in flight, and of captured graphs that are gone:
// all that was instantiated from them too. CUDA may say so a little later; a later call gives back the rest.
// Returns the captures, by the numbers of CudaDriver::capture(), that keep theirs.
std::vector<uint64_t> release_buffers();
// Of page-locked memory that streams and captured graphs have.
size_t held_buffer_bytes();

}  // namespace kt::inline hybrid
