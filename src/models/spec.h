// What a decoder-only transformer is made of, as values: a family file turns a config into a ModelSpec,
// transformer.cc builds and runs any of them. No weights, no loops over elements. Names of tensors are relative
// to the layer's prefix, without ".weight".
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/table.h"
#include "nn/delta_shape.h"
#include "nn/rope.h"
#include "nn/router.h"

namespace kt::inline models {

// Grouped-query attention.
struct GqaSpec {
  int heads = 0, kv_heads = 0, head_dim = 0;
  bool qkv_bias = false, o_bias = false;
  // RMS norms of q and k before the rotation: over each head, or over all heads' numbers together. kHeadLast is over
  // each head behind the rotation, and has no weights.
  enum class Norm { kNone, kHead, kAll, kHeadLast } norm = Norm::kNone;
  bool v_norm = false;          // an RMS norm of each head of values, without weights
  bool keys_as_values = false;  // no matrix of values: they are what k gives, before its norm
  bool sinks = false;           // a learned score for each head that has no value
  bool gated = false;  // q has for each head as many numbers again, whose sigmoids multiply what it gives
  RopeSpec rope;       // no dims: positions do not rotate them
  QueryGrowth growth;  // of queries along the text
  double scale = 0;    // of q . k
  int window = 0;      // positions a token sees; 0: all
  int chunk = 0;       // positions t and j see each other only where t / chunk == j / chunk; 0: all do
  struct Names {
    std::string q = "self_attn.q_proj", k = "self_attn.k_proj", v = "self_attn.v_proj",
                o = "self_attn.o_proj";
    std::string q_norm = "self_attn.q_norm", k_norm = "self_attn.k_norm", sinks = "self_attn.sinks";
  } names;
};

// Chooses the keys that a layer attends to (nn/indexer.h).
struct IndexerSpec {
  bool shared =
      false;  // what the last layer that is not shared chose is seen here too; nothing of its own but the budget
  int heads = 0, dim = 0;
  int budget = 0;          // keys that a token attends to; where it sees no more, to all of them
  RopeSpec rope;           // of the first numbers of queries and of the key
  double norm_eps = 1e-6;  // of the key's norm
  struct Names {
    std::string q = "self_attn.indexer.wq_b", k = "self_attn.indexer.wk", k_norm = "self_attn.indexer.k_norm",
                weights = "self_attn.indexer.weights_proj";
  } names;
};

// Multi-head latent attention, run absorbed: the cache holds one vector [kv_rank + rope] for all heads.
struct MlaSpec {
  int heads = 0;
  int q_rank = 0;  // 0: q_proj, without a low-rank step
  int kv_rank = 0, nope = 0, rotated = 0, v = 0;
  bool bias = false;                   // of q_a and kv_a projections, and o
  double norm_eps = 1e-6;              // of the norms of q_a and kv_a; the model's own is for the others
  RopeSpec rope;                       // of the `rotated` numbers
  QueryGrowth growth;                  // of queries along the text
  double scale = 0;                    // of q . k
  int window = 0;                      // positions a token sees; 0: all
  std::optional<IndexerSpec> indexer;  // none: all keys are seen. Takes what q_a gives, behind its norm
  struct Names {
    std::string q = "self_attn.q_proj", q_a = "self_attn.q_a_proj", q_a_norm = "self_attn.q_a_layernorm",
                q_b = "self_attn.q_b_proj";
    std::string kv_a = "self_attn.kv_a_proj_with_mqa", kv_a_norm = "self_attn.kv_a_layernorm",
                kv_b = "self_attn.kv_b_proj", o = "self_attn.o_proj";
  } names;
};

// Linear attention by the gated delta rule.
struct DeltaSpec {
  DeltaShape shape;
  int taps = 4;  // of the short convolution
  struct Names {
    // Queries, keys and values of all heads one after the other, and gates, b and a by themselves. Without a name for
    // gates `joined` has q | k | values | gates of each key head in turn, without one for a `b` has b | a.
    std::string joined = "linear_attn.in_proj_qkv", gates = "linear_attn.in_proj_z",
                b = "linear_attn.in_proj_b", a = "linear_attn.in_proj_a";
    std::string convolution = "linear_attn.conv1d", norm = "linear_attn.norm", out = "linear_attn.out_proj";
    std::string rates = "linear_attn.A_log", steps = "linear_attn.dt_bias";  // the tensors themselves
  } names;
  bool mixed() const { return names.gates.empty(); }
};

// What mixes tokens in a layer; each kind is a file, models/<kind>_mixer.cc.
using MixerSpec = std::variant<GqaSpec, MlaSpec, DeltaSpec>;

// One gated MLP for every token.
struct DenseSpec {
  int inter = 0;
  Activation activation;
  bool bias = false;  // of all three matrices
  struct Names {
    std::string gate = "mlp.gate_proj", up = "mlp.up_proj", down = "mlp.down_proj";
  } names;
};

// Routed experts, and a shared one beside them.
struct MoeSpec {
  int experts = 0, top_k = 0, inter = 0;
  RouterSpec router;
  int shared_inter = 0;      // of the shared expert; 0: none
  bool shared_gate = false;  // its output is multiplied by sigmoid(gate . x)
  // The router reads what the layer gets, before its first norm; else what experts read.
  bool routes_first = false;
  bool weighs_inputs = false;  // weights multiply what experts read, not what they give
  Activation activation;
  // Routed and shared expert side by side, each between norms of its own.
  struct Apart {
    // What the router reads of x in place of what experts read: rms(x) * these [hidden] / sqrt(hidden). The tensor
    // itself, as the next.
    std::string router_scale = "router.scale";
    std::string expert_scales = "router.per_expert_scale";  // [experts], of weights behind all else
    // Of what routed experts read of x, in place of what the layer's norm gives; of what they and the shared one give.
    std::string routed_norm = "pre_feedforward_layernorm_2", routed_out_norm = "post_feedforward_layernorm_2",
                shared_out_norm = "post_feedforward_layernorm_1";
  };
  std::optional<Apart> apart;
  struct Names {
    std::string router = "mlp.gate";
    std::string experts;  // the module of all routed ones; empty: beside the router
    std::string correction_bias = "mlp.gate.e_score_correction_bias";  // the tensor itself
    std::string shared = "mlp.shared_experts";                         // ".gate_proj" ... follow
    std::string shared_gate = "mlp.shared_expert_gate";
  } names;
};

using FeedForwardSpec = std::variant<DenseSpec, MoeSpec>;

// How the parts of a layer add to the stream of activations.
enum class Residual {
  kPreNorm,    // x += mixer(norm(x)); x += feed_forward(norm(x))
  kBothNorms,  // x += norm(mixer(norm(x))); x += norm(feed_forward(norm(x))); x *= a number of the layer
};

struct LayerSpec {
  MixerSpec mixer;
  FeedForwardSpec feed_forward;
  Residual residual = Residual::kPreNorm;
  std::string input_norm = "input_layernorm", post_norm = "post_attention_layernorm";
  // kBothNorms: of what the mixer gives, of what the feed-forward part gives, and the tensor of that number.
  std::string mixed_norm = "post_attention_layernorm", fed_norm = "post_feedforward_layernorm",
              scalar = "layer_scalar";

  const MoeSpec* moe() const { return std::get_if<MoeSpec>(&feed_forward); }  // null: a dense layer
  const IndexerSpec* indexer() const {                                        // null: all keys are seen
    const auto* mla = std::get_if<MlaSpec>(&mixer);
    return mla && mla->indexer ? &*mla->indexer : nullptr;
  }
};

struct ModelSpec {
  std::string family;  // "qwen3_moe", for reports
  int hidden = 0, vocab = 0, context = 0;
  double norm_eps = 1e-6;
  bool norms_add_one = false;  // norms multiply by 1 + their weights, but for the one behind the delta rule
  bool tied_embeddings = false;
  double embedding_scale = 1;  // embeddings are multiplied by it
  double logit_cap = 0;        // a logit l is cap tanh(l / cap); 0: itself
  std::string embedding = "model.embed_tokens", final_norm = "model.norm", head = "lm_head",
              prefix = "model.layers";
  std::vector<LayerSpec> layers;

  // What this model has that not every place runs yet (Ops::runs_all), in words; null: nothing.
  const char* host_only() const;
  // Attention to all keys, whatever indexers would choose: another model past their budget.
  void forget_indexers() {
    for (LayerSpec& layer : layers)
      if (auto* mla = std::get_if<MlaSpec>(&layer.mixer)) mla->indexer.reset();
  }
  // Tokens of a text that layers can run over one by one, each with nothing but its input: past its budget a layer that
  // shares a choice needs the one that chose.
  int context_of_single_layers() const {
    int least = context;
    for (const LayerSpec& layer : layers)
      if (const IndexerSpec* indexer = layer.indexer(); indexer && indexer->shared)
        least = std::min(least, indexer->budget);
    return least;
  }
  // Of the first layer that routes: all that do have as many experts of one size. Null: a dense model.
  const MoeSpec* moe() const {
    for (const LayerSpec& layer : layers)
      if (layer.moe()) return layer.moe();
    return nullptr;
  }
};

}  // namespace kt::inline models
