#include "models/family.h"

#include <algorithm>
#include <cmath>

#include "base/log.h"
#include "text/shown.h"

namespace kt::inline models {
namespace {

// Where rope's values are: both spellings are one object; rope_scaling, where it is more than null, wins.
std::optional<ConfigReader> rope_object(const ConfigReader& config) {
  for (const std::string_view key : {"rope_scaling", "rope_parameters"})
    if (std::optional<ConfigReader> object = config.object(key)) return object;
  return std::nullopt;
}

std::string rope_type(const ConfigReader& rope) {
  return rope.string("rope_type", rope.string("type", "default"));
}

// Yarn's length factor of attention: 0.1 mscale ln(factor) + 1.
double yarn_gain(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

double positive(const ConfigReader& config, std::string_view key, double value) {
  if (!(value > 0)) config.wrong(key, "a number above 0");
  return value;
}

constexpr std::string_view kQueryGrowth = "llama_4_scaling_beta";

// The pretraining context: beside rope's object it wins over the one inside.
int original_context(const ConfigReader& config, const ConfigReader& rope, int context) {
  constexpr std::string_view kKey = "original_max_position_embeddings";
  return config.has(kKey) ? config.integer(kKey) : rope.integer(kKey, context, 1);
}

void read_yarn(const ConfigReader& config, const ConfigReader& rope, RopeSpec& out, ModelSpec& spec) {
  out.scaling = RopeSpec::Scaling::kYarn;
  out.original_context = original_context(config, rope, spec.context);
  out.factor = positive(rope, "factor",
                        rope.number("factor", static_cast<double>(spec.context) / out.original_context));
  // 0 stands for the default, as null does.
  if (const double beta = rope.number("beta_fast", 0)) out.beta_fast = positive(rope, "beta_fast", beta);
  if (const double beta = rope.number("beta_slow", 0)) out.beta_slow = positive(rope, "beta_slow", beta);
  out.truncate = rope.boolean("truncate", true);
  const double mscale = rope.number("mscale", 0), all = rope.number("mscale_all_dim", 0);
  // mscale counts only next to mscale_all_dim.
  const double gain = mscale != 0 && all != 0 ? yarn_gain(out.factor, mscale) / yarn_gain(out.factor, all)
                                              : yarn_gain(out.factor, 1);
  out.attention_factor = rope.number("attention_factor", gain);
  // Some configs state the length before stretching.
  const double stretched = std::min<double>(out.original_context * out.factor, ConfigReader::kMost);
  spec.context = std::max(spec.context, static_cast<int>(stretched));
}

void read_llama3(const ConfigReader& config, const ConfigReader& rope, int context, RopeSpec& out) {
  out.scaling = RopeSpec::Scaling::kLlama3;
  out.original_context = original_context(config, rope, context);
  out.factor = positive(rope, "factor", rope.number("factor"));
  out.low_freq_factor = positive(rope, "low_freq_factor", rope.number("low_freq_factor"));
  out.high_freq_factor = positive(rope, "high_freq_factor", rope.number("high_freq_factor"));
  // Equal ones leave nothing between: frequencies change at one wavelength.
  if (out.high_freq_factor < out.low_freq_factor)
    rope.wrong("high_freq_factor", text("at least low_freq_factor, {}", out.low_freq_factor));
}

// Past that many tokens all positions of a text would be other ones, also those whose keys are in the cache
// already: no text gets there.
void end_texts_at(int tokens, const ConfigReader& rope, std::string_view key, ModelSpec& spec) {
  log_once(LogLevel::kWarning,
           "{}: positions of texts of more than {} tokens are not computed; texts end there", rope.place(key),
           tokens);
  spec.context = std::min(spec.context, tokens);
}

// Each frequency divided by a number of its own; by another one in texts longer than those of pretraining.
void read_longrope(const ConfigReader& config, const ConfigReader& rope, RopeSpec& out, ModelSpec& spec) {
  out.divisors = rope.numbers("short_factor");
  const int original = original_context(config, rope, spec.context);
  const double factor = rope.number("factor", static_cast<double>(spec.context) / original);
  const std::vector<double> in_long_texts = rope.numbers("long_factor");
  if (in_long_texts.size() != out.divisors.size())
    fail("{} has {} numbers, short_factor {}", rope.place("long_factor"), in_long_texts.size(),
         out.divisors.size());
  if (in_long_texts != out.divisors && original < spec.context)
    end_texts_at(original, rope, "long_factor", spec);
  if (out.divisors.size() != static_cast<size_t>(out.dims / 2))
    fail("{} has {} numbers, expected {}", rope.place("short_factor"), out.divisors.size(), out.dims / 2);
  for (const double divisor : out.divisors)
    if (!(divisor > 0)) rope.wrong("short_factor", "numbers above 0");
  const bool stretched = factor > 1 && original > 1;
  const double gain = stretched ? std::sqrt(1 + std::log(factor) / std::log(original)) : 1;
  out.attention_factor = positive(rope, "attention_factor", rope.number("attention_factor", gain));
}

}  // namespace

Activation read_activation(const ConfigReader& config, std::string_view key, std::string_view fallback) {
  const std::string name = config.string(key, fallback);
  if (name == "silu" || name == "swish") return {.kind = ActivationKind::kSwiGlu};
  if (name == "gelu") return {.kind = ActivationKind::kGeluErf};
  if (name == "gelu_pytorch_tanh" || name == "gelu_new") return {.kind = ActivationKind::kGeluTanh};
  if (name == "relu") return {.kind = ActivationKind::kRelu};
  config.unsupported(key, "silu, gelu, gelu_pytorch_tanh, relu");
}

void check_row(const ConfigReader& config, int heads, int dims) {
  if (static_cast<int64_t>(heads) * dims > ConfigReader::kMost)
    fail("{}: {} heads of {} numbers, at most {} numbers together are read",
         config.place("num_attention_heads"), heads, dims, ConfigReader::kMost);
}

ModelSpec describe_common(const ConfigReader& config, double norm_eps) {
  ModelSpec spec;
  spec.hidden = config.known(config.model().hidden, "hidden_size");
  spec.vocab = config.integer("vocab_size");
  spec.context = config.integer("max_position_embeddings");
  spec.norm_eps = config.number("rms_norm_eps", norm_eps);
  if (spec.norm_eps < 0) config.wrong("rms_norm_eps", "a number of at least 0");
  spec.tied_embeddings = config.boolean("tie_word_embeddings", false);
  spec.layers.resize(static_cast<size_t>(config.known(config.model().layers, "num_hidden_layers")));
  return spec;
}

GqaSpec read_gqa(const ConfigReader& config, const ModelSpec& spec, int head_dim) {
  GqaSpec gqa;
  gqa.heads = config.integer("num_attention_heads");
  gqa.kv_heads = config.integer("num_key_value_heads", gqa.heads, 1);
  if (gqa.heads % gqa.kv_heads != 0)
    config.wrong("num_key_value_heads", text("a divisor of num_attention_heads, {}", gqa.heads));
  gqa.head_dim = config.integer("head_dim", head_dim != 0 ? head_dim : spec.hidden / gqa.heads, 2);
  if (gqa.head_dim < 2 || gqa.head_dim % 2 != 0)
    fail("{}: {} numbers a head, expected an even number", config.place("head_dim"), gqa.head_dim);
  check_row(config, gqa.heads, gqa.head_dim);
  gqa.scale = 1 / std::sqrt(static_cast<double>(gqa.head_dim));
  return gqa;
}

MlaSpec read_mla(const ConfigReader& config) {
  MlaSpec mla;
  mla.heads = config.integer("num_attention_heads");
  if (config.integer("num_key_value_heads", mla.heads, 1) != mla.heads)
    config.wrong("num_key_value_heads", text("num_attention_heads, {}", mla.heads));
  mla.q_rank = config.integer("q_lora_rank", 0);
  mla.kv_rank = config.integer("kv_lora_rank");
  mla.nope = config.integer("qk_nope_head_dim");
  mla.rotated = config.integer("qk_rope_head_dim");
  mla.v = config.integer("v_head_dim");
  mla.bias = config.boolean("attention_bias", false);
  check_row(config, mla.heads, mla.nope + std::max(mla.rotated, mla.v));
  mla.scale = 1 / std::sqrt(static_cast<double>(mla.nope + mla.rotated));
  return mla;
}

MlaSpec read_rotating_mla(const ConfigReader& config, ModelSpec& spec) {
  MlaSpec mla = read_mla(config);
  mla.rope = read_rope(config, {.dims = mla.rotated}, spec);
  mla.rope.interleaved = config.boolean("rope_interleave", true);
  scale_softmax_for_rope(config, mla);
  return mla;
}

namespace {

// Frequencies of the whole head, of which the last ones are 0.
void read_proportional(const ConfigReader& rope, RopeDefaults defaults, double part, RopeSpec& out) {
  out.dims = defaults.dims;
  if (!(part >= 0 && part <= 1)) rope.wrong("partial_rotary_factor", "a number from 0 to 1");
  out.still = out.dims / 2 - static_cast<int>(part * out.dims / 2);
  out.factor = positive(rope, "factor", rope.number("factor", 1));
  if (out.factor != 1) out.scaling = RopeSpec::Scaling::kLinear;
}

// `rope` has the values, or is silent where `config` speaks.
RopeSpec read_rope_values(const ConfigReader& config, const ConfigReader& rope, std::string_view type,
                          RopeDefaults defaults, ModelSpec& spec) {
  RopeSpec out;
  out.theta = positive(rope.has("rope_theta") ? rope : config, "rope_theta",
                       rope.number("rope_theta", config.number("rope_theta", defaults.theta)));
  const double part =
      rope.number("partial_rotary_factor", config.number("partial_rotary_factor", defaults.part));
  if (type == "proportional") {
    read_proportional(rope, defaults, part, out);
    return out;
  }
  out.dims = part > 0 && part <= 1 ? static_cast<int>(defaults.dims * part) : 0;
  if (out.dims < 2 || out.dims % 2 != 0)
    fail("{}: {} of {} numbers of a head are rotated, expected an even number of them",
         rope.place("partial_rotary_factor"), part * defaults.dims, defaults.dims);
  if (type == "default") return out;
  if (type == "yarn") {
    read_yarn(config, rope, out, spec);
  } else if (type == "llama3") {
    read_llama3(config, rope, spec.context, out);
  } else if (type == "longrope") {
    read_longrope(config, rope, out, spec);
  } else if (type == "linear") {
    out.factor = positive(rope, "factor", rope.number("factor"));
    out.scaling = RopeSpec::Scaling::kLinear;
  } else if (type == "dynamic") {
    out.factor = positive(rope, "factor", rope.number("factor"));
    // Within that context it is no scaling at all.
    if (out.factor > 1) end_texts_at(spec.context, rope, "factor", spec);
  } else {
    rope.unsupported(rope.has("rope_type") ? "rope_type" : "type",
                     "default, linear, dynamic, yarn, llama3, longrope, proportional");
  }
  return out;
}

}  // namespace

RopeSpec read_rope(const ConfigReader& config, RopeDefaults defaults, ModelSpec& spec) {
  const std::optional<ConfigReader> object = rope_object(config);
  const ConfigReader& rope = object ? *object : config;
  for (const std::string_view nested : {"full_attention", "sliding_attention"})
    if (object && rope.has(nested))
      fail_as(ErrorKind::kUnsupported, "{}: positions that differ between kinds of layers are not supported",
              rope.place(nested));
  return read_rope_values(config, rope, object ? rope_type(rope) : "default", defaults, spec);
}

RopeSpec read_rope_of(const ConfigReader& config, std::string_view kind, RopeDefaults defaults,
                      ModelSpec& spec) {
  const std::optional<ConfigReader> kinds = config.object("rope_parameters");
  if (!kinds) config.missing("rope_parameters");
  const std::optional<ConfigReader> rope = kinds->object(kind);
  if (!rope) kinds->missing(kind);
  return read_rope_values(*rope, *rope, rope_type(*rope), defaults, spec);
}

void scale_softmax_for_rope(const ConfigReader& config, MlaSpec& mla) {
  const std::optional<ConfigReader> rope = rope_object(config);
  if (!rope || rope_type(*rope) == "default") return;
  const double all = rope->number("mscale_all_dim", 0);
  if (all == 0) return;
  const double gain = yarn_gain(mla.rope.factor, all);
  mla.scale *= gain * gain;
}

QueryGrowth read_query_growth(const ConfigReader& config) {
  const std::optional<ConfigReader> rope = rope_object(config);
  if (!rope) config.missing("rope_parameters");
  QueryGrowth growth{.beta = rope->number(kQueryGrowth)};
  growth.length = rope->integer("original_max_position_embeddings");
  if (growth.beta < 0) rope->wrong(kQueryGrowth, "a number of at least 0");
  return growth;
}

void refuse_query_growth(const ConfigReader& config) {
  if (config.number(kQueryGrowth, 0) != 0) config.unsupported(kQueryGrowth, "0");
}

MoeSpec read_experts(const ConfigReader& config, ExpertKeys keys) {
  MoeSpec moe;
  moe.experts = config.known(config.model().experts, keys.experts);
  moe.top_k = config.known(config.model().top_k, keys.top_k);
  if (moe.top_k > moe.experts)
    fail("{}: {} of {} experts cannot be chosen", config.place(keys.top_k), moe.top_k, moe.experts);
  // model() takes intermediate_size for it, which is the dense layers' here.
  if (keys.inter != "intermediate_size" && !config.has(keys.inter)) config.missing(keys.inter);
  moe.inter = config.known(config.model().inter, keys.inter);
  moe.activation = read_activation(config, "hidden_act", "silu");
  return moe;
}

void read_groups(const ConfigReader& config, MoeSpec& moe) {
  RouterSpec& router = moe.router;
  router.groups = config.integer("n_group", 1, 1);
  router.top_groups = config.integer("topk_group", 1, 1);
  if (moe.experts % router.groups != 0)
    config.wrong("n_group", text("a divisor of the {} experts", moe.experts));
  if (router.top_groups > router.groups)
    config.wrong("topk_group", text("at most n_group, {}", router.groups));
  const int reach = moe.experts / router.groups * router.top_groups;
  if (moe.top_k > reach)
    fail("{}: {} experts cannot be chosen, {} groups have {}", config.place("topk_group"), moe.top_k,
         router.top_groups, reach);
}

void read_sigmoid_router(const ConfigReader& config, double scale, MoeSpec& moe) {
  read_groups(config, moe);
  // dots.llm1 is published with the way to choose in the place of the scores.
  const std::string score = config.string("scoring_func", "sigmoid");
  if (score != "sigmoid" && score != "noaux_tc") config.unsupported("scoring_func", "sigmoid");
  if (config.string("topk_method", "noaux_tc") != "noaux_tc") config.unsupported("topk_method", "noaux_tc");
  RouterSpec& router = moe.router;
  router.score = RouterSpec::Score::kSigmoid;
  router.group_score = RouterSpec::GroupScore::kTopTwo;
  if (router.groups > 1 && moe.experts / router.groups < 2)
    config.wrong("n_group", text("groups of at least 2 of the {} experts", moe.experts));
  router.correction_bias = true;
  router.normalise = config.boolean("norm_topk_prob", true);
  router.normalise_floor = 1e-20;
  router.scale = config.number("routed_scaling_factor", scale);
}

void read_shared_experts(const ConfigReader& config, MoeSpec& moe, std::string_view key) {
  const int64_t shared = config.integer(key, 0) * static_cast<int64_t>(moe.inter);
  if (shared > ConfigReader::kMost) config.wrong(key, text("at most {} rows together", ConfigReader::kMost));
  moe.shared_inter = static_cast<int>(shared);
}

void refuse_moe_layer_freq(const ConfigReader& config) {
  if (config.integer("moe_layer_freq", 1) != 1) config.unsupported("moe_layer_freq", "1");
}

void require_dense_layers(const ConfigReader& config) {
  if (!config.has("mlp_layer_types") && !config.has("first_k_dense_replace") &&
      !config.has("mlp_only_layers"))
    config.missing("mlp_layer_types");
}

void refuse_mlp_bias(const ConfigReader& config) { require_flag(config, "mlp_bias", false); }

void require_flag(const ConfigReader& config, std::string_view key, bool value) {
  if (config.boolean(key, value) != value) config.unsupported(key, value ? "true" : "false");
}

void require_word(const ConfigReader& config, std::string_view key, std::string_view value) {
  if (config.string(key, value) != value) config.unsupported(key, value);
}

void fill_layers(const ConfigReader& config, const MixerSpec& mixer, const std::optional<MoeSpec>& moe,
                 ModelSpec& spec) {
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    LayerSpec& layer = spec.layers[i];
    layer.mixer = mixer;
    if (moe && config.model().is_moe_layer(static_cast<int>(i)))
      layer.feed_forward = *moe;
    else
      layer.feed_forward = DenseSpec{.inter = config.integer("intermediate_size"),
                                     .activation = read_activation(config, "hidden_act", "silu"),
                                     .names = {}};
  }
}

std::vector<bool> read_layer_flags(const ConfigReader& config, std::string_view key, size_t layers) {
  const std::vector<double> numbers = config.numbers(key);
  if (!numbers.empty() && numbers.size() != layers)
    config.wrong(key, text("one number for each of {} layers", layers));
  std::vector<bool> out;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] != 0 && numbers[i] != 1)
      fail("{}[{}] is {}, expected 0 or 1", config.place(key), i, numbers[i]);
    out.push_back(numbers[i] != 0);
  }
  return out;
}

void set_window(LayerSpec& layer, int window) {
  const auto set = [&](auto& mixer) {
    if constexpr (requires { mixer.window; }) mixer.window = window;
  };
  std::visit(set, layer.mixer);
}

bool read_layer_types(const ConfigReader& config, ModelSpec& spec) {
  const std::vector<std::string> types = config.strings("layer_types");
  if (types.empty()) return false;
  if (types.size() != spec.layers.size())
    config.wrong("layer_types", text("one string for each of {} layers", spec.layers.size()));
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == "full_attention") continue;
    if (types[i] != "sliding_attention")
      fail_as(ErrorKind::kUnsupported, "{}[{}] is {}; supported: full_attention, sliding_attention",
              config.place("layer_types"), i, shown(types[i]));
    set_window(spec.layers[i], config.integer("sliding_window"));
  }
  return true;
}

}  // namespace kt::inline models
