// Adapters in GGUF files: what their metadata and tensors are called, and what of them is stored in another order than
// the published one.
#include <algorithm>
#include <array>
#include <charconv>

#include "base/error.h"
#include "weights/gguf/gguf_names.h"
#include "weights/lora/lora_file_state.h"

namespace kt::inline weights {
namespace {

// kv_b is stored in two halves, that of the keys transposed head by head.
constexpr std::string_view kBothHalves = ".kv_b_proj", kKeys = ".keys", kHalfValues = ".values";

std::optional<int> block_number(std::string_view tensor) {
  constexpr std::string_view kBlock = "blk.";
  if (!tensor.starts_with(kBlock)) return {};
  int layer = 0;
  const char* const from = tensor.data() + kBlock.size();
  const auto [end, error] = std::from_chars(from, tensor.data() + tensor.size(), layer);
  if (error != std::errc() || layer < 0 || end == tensor.data() + tensor.size() || *end != '.') return {};
  return layer;
}

// Whether every slice of a [slices, rows, columns] is the first one.
bool are_alike(const std::vector<float>& values, size_t slices) {
  const auto slice = static_cast<ptrdiff_t>(values.size() / slices);
  for (size_t i = 1; i < slices; ++i)
    if (!std::equal(values.begin(), values.begin() + slice,
                    values.begin() + static_cast<ptrdiff_t>(i) * slice))
      return false;
  return true;
}

// [rows, columns] as [columns, rows].
std::vector<float> turned(const float* values, int64_t rows, int64_t columns) {
  std::vector<float> out(static_cast<size_t>(rows * columns));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) out[static_cast<size_t>(c * rows + r)] = values[r * columns + c];
  return out;
}

}  // namespace

std::optional<int64_t> number_in_config(const Json& config, const char* key) {
  if (!config.is_object()) return {};
  if (const auto found = config.find(key); found != config.end() && found->is_number_integer())
    return found->get<int64_t>();
  for (const char* const inner : {"text_config", "language_config", "llm_config", "thinker_config"})
    if (const auto found = config.find(inner); found != config.end())
      if (const auto number = number_in_config(*found, key)) return number;
  return {};
}

AttentionHeads attention_heads(const Json& config) {
  const int64_t q = number_in_config(config, "num_attention_heads").value_or(0);
  return {.q = q, .kv = number_in_config(config, "num_key_value_heads").value_or(q)};
}

void LoraFile::State::open_gguf(GgufFamilies families) {
  files.emplace_back(path);
  const Checkpoint& file = files.back();
  const auto word = [&](const char* key) -> std::string_view {
    const auto found = file.gguf().metadata.find(key);
    const auto* text =
        found == file.gguf().metadata.end() ? nullptr : std::get_if<std::string_view>(&found->second);
    return text ? *text : std::string_view();
  };
  if (word("general.type") != "adapter" || word("adapter.type") != "lora")
    fail("{}: general.type \"{}\", adapter.type \"{}\": expected \"adapter\" and \"lora\"", path,
         word("general.type"), word("adapter.type"));
  const auto found = file.gguf().metadata.find("adapter.lora.alpha");
  const auto* value = found == file.gguf().metadata.end() ? nullptr : std::get_if<double>(&found->second);
  if (!value) fail("{}: no number adapter.lora.alpha", path);
  alpha = *value;
  const std::string_view architecture = word("general.architecture");
  for (const GgufFamily* one : families)
    if (one->gguf == architecture) family = one;
  if (!family)
    fail_as(ErrorKind::kUnsupported, "{}: general.architecture \"{}\": expected one of {}", path,
            architecture, gguf_architectures(families));
  for (const Tensor& tensor : file.tensors()) add_gguf(tensor);
}

// "blk.3.ffn_gate_exps.weight.lora_a".
void LoraFile::State::add_gguf(const Tensor& tensor) {
  const std::string_view name = tensor.name;
  const bool a = name.ends_with(".lora_a");
  if (!a && !name.ends_with(".lora_b")) fail("{}: {}: neither lora_a nor lora_b", path, name);
  const std::string_view weight = name.substr(0, name.size() - 7);
  const char factor = a ? 'A' : 'B';
  constexpr std::array<std::tuple<std::string_view, std::optional<Projection>>, 4> kExperts = {
      {{"ffn_gate_exps.weight", Projection::kGate},
       {"ffn_up_exps.weight", Projection::kUp},
       {"ffn_down_exps.weight", Projection::kDown},
       {"ffn_gate_up_exps.weight", std::nullopt}}};
  const std::optional<int> layer = block_number(weight);
  for (const auto& [ends, projection] : kExperts) {
    if (!weight.starts_with("blk.") || !weight.ends_with(ends)) continue;
    if (!layer) fail("{}: {}: no number of a layer", path, name);
    return add({.layer = *layer, .projection = projection}, factor, tensor, "", 0);
  }
  const bool keys = weight.ends_with(".attn_k_b.weight");
  if (layer && (keys || weight.ends_with(".attn_v_b.weight")))
    return add({.module = text("layers.{}.self_attn{}{}", *layer, kBothHalves, keys ? kKeys : kHalfValues)},
               factor, tensor, "", 0);
  const std::optional<std::string> published = published_name(family, weight);
  if (!published) fail("{}: {}: no such tensor in models of {}", path, name, family->gguf);
  const std::string module = published->substr(0, published->find(".weight"));
  add({.module = std::string(from_layers(module))}, factor, tensor, module, 0);
}

// Rows of q and k of some families are stored for the rotation of neighbours, in the model and in its adapters: row
// h d + 2 i + half of the file is row h d + half d/2 + i of the published matrix.
void LoraFile::State::order_rows(std::string_view module, const LoraPair& pair,
                                 LowRankFactors& factors) const {
  const bool q = module.ends_with(".q_proj"), k = module.ends_with(".k_proj");
  if (!family || !family->interleaved || (!q && !k)) return;
  const auto rank = static_cast<size_t>(factors.rank), rows = factors.b.size() / rank;
  const auto count = static_cast<size_t>(q ? heads.q : heads.kv);
  if (count == 0 || rows % (2 * count) != 0)
    fail("{}: {}: {} rows are not {} heads of an even number of rows each", path, pair.b->name, rows, count);
  const size_t half_rows = rows / count / 2;
  std::vector<float> stored = factors.b;
  for (size_t h = 0; h < count; ++h)
    for (size_t half = 0; half < 2; ++half)
      for (size_t i = 0; i < half_rows; ++i)
        std::copy_n(stored.begin() + static_cast<ptrdiff_t>((2 * h * half_rows + 2 * i + half) * rank), rank,
                    factors.b.begin() + static_cast<ptrdiff_t>(((2 * h + half) * half_rows + i) * rank));
}

// kv_b's factors out of those of its halves: W = B A, of which keys have, head by head, (B_h A)^T = A^T B_h^T, and
// values B_h A. So one A has to serve all heads of both.
std::optional<LowRankFactors> LoraFile::State::joined_halves(const std::string& module, int64_t n,
                                                             int64_t k) const {
  if (!family || !module.ends_with(kBothHalves)) return {};
  const LoraPair* const keys = find({.module = module + std::string(kKeys)});
  const LoraPair* const halves = find({.module = module + std::string(kHalfValues)});
  if (!keys && !halves) return {};
  if (!keys || !halves)
    fail_as(ErrorKind::kUnsupported,
            "{}: {}: kv_b has keys and values; an adapter of one of them is not read", path,
            (keys ? keys : halves)->a->name);
  const std::vector<int64_t>&key_a = keys->a->shape, &value_b = halves->b->shape;
  if (key_a.size() != 3) wrong_shape(*keys->a, "[heads, rank, rows of keys]");
  if (value_b.size() != 3) wrong_shape(*halves->b, "[heads, rows of values, rank]");
  const int64_t count = key_a[0], rank = key_a[1], nope = key_a[2], v = value_b[1];
  if (count < 1 || rank < 1 || value_b != std::vector<int64_t>{count, v, rank} || count * (nope + v) != n)
    wrong_shape(*halves->b, text("[{}, rows of values, {}], {} rows with those of keys", count, rank, n));
  if (keys->b->shape != std::vector<int64_t>{count, k, rank})
    wrong_shape(*keys->b, text("[{}, {}, {}]", count, k, rank));
  if (halves->a->shape != std::vector<int64_t>{count, rank, k})
    wrong_shape(*halves->a, text("[{}, {}, {}]", count, rank, k));
  const auto slices = static_cast<size_t>(count);
  std::vector<float> a = values(*halves, *halves->a), turned_a = values(*keys, *keys->b);
  const std::vector<float> of_keys = values(*keys, *keys->a), of_values = values(*halves, *halves->b);
  a.resize(are_alike(a, slices) ? a.size() / slices : 0);
  if (a.empty() || !are_alike(turned_a, slices) || turned(turned_a.data(), k, rank) != a)
    fail_as(ErrorKind::kUnsupported, "{}: {}: heads with factors of their own are not read", path,
            halves->a->name);
  LowRankFactors out{.rank = static_cast<int>(rank),
                     .scale = scale_of(*halves, "", static_cast<int>(rank)),
                     .a = std::move(a)};
  for (int64_t h = 0; h < count; ++h) {
    const std::vector<float> rows = turned(of_keys.data() + h * rank * nope, rank, nope);
    out.b.insert(out.b.end(), rows.begin(), rows.end());
    const auto from = of_values.begin() + h * v * rank;
    out.b.insert(out.b.end(), from, from + v * rank);
  }
  return out;
}

}  // namespace kt::inline weights
