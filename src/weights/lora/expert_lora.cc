#include "weights/lora/expert_lora.h"

#include <algorithm>
#include <filesystem>
#include <regex>

#include "base/error.h"
#include "text/shown.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;

constexpr int kMostLayers = 10000;
// Of a tensor's name: std::regex goes one call deeper with every letter.
constexpr size_t kMostName = 300;

[[noreturn]] void bad_shape(const AdapterFiles& adapter, const Tensor& tensor, const std::string& expected) {
  fail("{}: {}: expected {}, found {}", adapter.folder, shown(tensor.name), expected, describe(tensor));
}

LoraView view_of(const AdapterFiles& adapter, const Tensor& tensor) {
  return view_of(adapter.folder, tensor);
}

class AdapterReader {
 public:
  AdapterReader(const std::string& folder, std::optional<double> alpha) {
    std::error_code ignored;
    const std::string config = folder + "/" + kAdapterConfigFile, model = folder + "/" + kAdapterModelFile,
                      others = folder + "/" + kOtherExpertsFile;
    const bool has_others = fs::exists(others, ignored);
    out_.folder = folder;
    if (has_others && alpha && !fs::exists(config, ignored))
      out_.config = {{"peft_type", "LORA"}, {"bias", "none"}, {"task_type", "CAUSAL_LM"}};
    else
      out_.config = read_json(config);
    if (!out_.config.is_object() || out_.config.value("peft_type", Json()) != "LORA")
      fail("{}: expected an adapter of PEFT with peft_type LORA", config);
    if (alpha && !out_.config.contains("lora_alpha")) out_.config["lora_alpha"] = *alpha;
    if (!has_others || fs::exists(model, ignored)) {
      out_.file = MappedFile(model);
      out_.tensors = parse_safetensors(out_.file.bytes(), model).tensors;
    }
    if (!has_others) return;
    out_.others = MappedFile(others);
    out_.other_tensors = parse_safetensors(out_.others.bytes(), others).tensors;
  }

  AdapterFiles read() {
    // A factor has a value or more, so these are enough for every whole adapter.
    most_rooms_ = (out_.file.bytes().size() + out_.others.bytes().size()) / 2;
    for (const Tensor& tensor : out_.tensors)
      if (!take_fused(tensor) && !take_expert(tensor)) out_.rest.push_back(&tensor);
    for (const Tensor& tensor : out_.other_tensors) take_other(tensor);
    if (!fused_.empty() && per_expert_ > 0)
      fail("{}: routed experts in both layouts, fused and per expert", out_.folder);
    for (const auto& [layer, pairs] : fused_) unpack(layer, pairs);
    if (out_.layers.empty())
      fail("{}: no LoRA on routed experts: {} serves as it is", out_.folder, kAdapterModelFile);
    if (fused_.empty()) out_.found = LoraLayout::kPerExpert;
    check();
    if (!out_.config.contains("r")) out_.config["r"] = rank_of_experts();
    return std::move(out_);
  }

 private:
  struct Pair {
    const Tensor *a = nullptr, *b = nullptr;
  };
  struct FusedPairs {
    std::string prefix;
    Pair inner, outer;  // of ...experts.base_layer and of ...experts
  };

  int layer_number(const std::string& digits) const {
    const int layer = digits.size() < 6 ? std::stoi(digits) : kMostLayers;
    if (layer >= kMostLayers)
      fail("{}: layer or expert {}: expected a number below {}", out_.folder, shown(digits), kMostLayers);
    return layer;
  }

  // Room for so many experts of a layer. All of them have tensors, and what a file claims beyond that would only take
  // memory.
  void make_room(StoredExperts& layer, int number, size_t experts, const Tensor& tensor) {
    if (experts <= layer.experts.size()) return;
    rooms_ += experts - layer.experts.size();
    if (experts > kMostLayers || rooms_ > most_rooms_)
      fail("{}: {}: layer {} would have {} experts, with {} in all layers: more than the file has factors of",
           out_.folder, shown(tensor.name), number, experts, rooms_);
    layer.experts.resize(experts);
  }

  // What is written has the type of one of them.
  Dtype dtype_of(const Tensor& tensor) {
    if (!dtype_) dtype_ = tensor.dtype;
    if (tensor.dtype != *dtype_)
      bad_shape(out_, tensor, text("{}, as other factors of experts", name_of(*dtype_)));
    return *dtype_;
  }

  bool take_fused(const Tensor& tensor) {
    if (tensor.name.size() > kMostName) return false;
    static const std::regex name(R"((.*\blayers\.(\d+)\..*\bexperts)(\.base_layer)?\.lora_([AB])\.weight)");
    std::smatch found;
    if (!std::regex_match(tensor.name, found, name)) return false;
    FusedPairs& pairs = fused_[layer_number(found.str(2))];
    pairs.prefix = found.str(1);
    Pair& pair = found.length(3) > 0 ? pairs.inner : pairs.outer;
    (found.str(4) == "A" ? pair.a : pair.b) = &tensor;
    return true;
  }

  bool take_expert(const Tensor& tensor) {
    if (tensor.name.size() > kMostName) return false;
    static const std::regex name(
        R"((.*\blayers\.(\d+)\..*\bexperts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.lora_([AB])\.weight)");
    std::smatch found;
    if (!std::regex_match(tensor.name, found, name)) return false;
    const int number = layer_number(found.str(2));
    StoredExperts& layer = out_.layers[number];
    layer.prefix = found.str(1);
    const auto expert = static_cast<size_t>(layer_number(found.str(3)));
    make_room(layer, number, expert + 1, tensor);
    size_t part = 0;
    while (found.str(4) != kPublishedParts[part] && found.str(4) != kNumberedParts[part]) ++part;
    std::optional<LoraMatrices>& factors = layer.experts[expert][part];
    if (!factors) factors.emplace();
    (found.str(5) == "A" ? factors->a : factors->b) = view_of(out_, tensor);
    layer.dtype = dtype_of(tensor);
    ++per_expert_;
    return true;
  }

  // "layers.3.experts.gate_lora_a" [E, r, in], "..._b" [E, out, r].
  void take_other(const Tensor& tensor) {
    static const std::regex name(R"((?:.*\b)?layers\.(\d+)\..*\b(gate|up|down)_lora_([ab]))");
    std::smatch found;
    if (tensor.name.size() > kMostName || !std::regex_match(tensor.name, found, name) ||
        tensor.shape.size() != 3)
      fail("{}/{}: {}: expected names such as layers.3.experts.gate_lora_a with three dimensions, found {}",
           out_.folder, kOtherExpertsFile, shown(tensor.name), describe(tensor));
    const std::string digits = found.str(1);
    StoredExperts& layer = out_.layers[layer_number(digits)];
    layer.prefix = text("base_model.model.model.layers.{}.mlp.experts", digits);
    layer.dtype = dtype_of(tensor);
    const LoraView whole = view_of(out_, tensor);
    const size_t part = found.str(2) == "gate" ? kGatePart : found.str(2) == "up" ? kUpPart : kDownPart;
    if (layer.experts.empty())
      make_room(layer, layer_number(digits), static_cast<size_t>(tensor.shape[0]), tensor);
    if (layer.experts.size() != static_cast<size_t>(tensor.shape[0]))
      bad_shape(out_, tensor, text("{} experts", layer.experts.size()));
    for (size_t e = 0; e < layer.experts.size(); ++e) {
      std::optional<LoraMatrices>& factors = layer.experts[e][part];
      if (!factors) factors.emplace();
      LoraView one = whole;
      one.data += e * static_cast<size_t>(whole.rows * whole.columns) * whole.size;
      (found.str(3) == "a" ? factors->a : factors->b) = one;
    }
    ++per_expert_;
  }

  // The two matrices of a fused pair for each expert.
  void unpack(int number, const FusedPairs& pairs) {
    StoredExperts& layer = out_.layers[number];
    layer.prefix = pairs.prefix;
    // Where only one of the two has LoRA, PEFT wraps once: the names are the outer ones.
    const bool two = pairs.inner.a || pairs.inner.b;
    const bool gate_up_alone = !two && !targets("down_proj");
    if (two || gate_up_alone) unpack_gate_up(layer, number, two ? pairs.inner : pairs.outer);
    if (!gate_up_alone) unpack_one(layer, number, pairs.outer, "down_proj", kDownPart);
  }

  bool targets(const std::string& parameter) const {
    const auto names = out_.config.find("target_parameters");
    if (names == out_.config.end() || !names->is_array()) return true;
    return std::ranges::any_of(*names, [&](const Json& one) {
      return one.is_string() && one.get<std::string>().ends_with(parameter);
    });
  }

  int64_t experts_in(const StoredExperts& layer, const Pair& pair, int64_t rank) const {
    if (!pair.a || !pair.b) fail("{}: {}: lora_A or lora_B is missing", out_.folder, shown(layer.prefix));
    const LoraView a = view_of(out_, *pair.a), b = view_of(out_, *pair.b);
    if (a.rows % rank != 0) bad_shape(out_, *pair.a, text("a multiple of rank {} rows", rank));
    if (b.columns != a.rows) bad_shape(out_, *pair.b, text("{} columns, as lora_A has rows", a.rows));
    if (a.rows < rank) bad_shape(out_, *pair.a, text("at least rank {} rows", rank));
    return a.rows / rank;
  }

  // Of one expert: rows of A together, and every E-th column of B.
  static LoraMatrices of_expert(const LoraView& a, const LoraView& b, int64_t expert, int64_t experts,
                                int64_t rank) {
    LoraMatrices out{.a = a.part(expert * rank, rank, 0, a.columns), .b = b.part(0, b.rows, expert, 1)};
    out.b.columns = rank;
    out.b.column_stride = experts;
    return out;
  }

  void unpack_gate_up(StoredExperts& layer, int number, const Pair& pair) {
    const int64_t rank = rank_in(out_, "gate_up_proj"), experts = experts_in(layer, pair, rank);
    const LoraView a = view_of(out_, *pair.a), b = view_of(out_, *pair.b);
    if (b.rows % 2 != 0) bad_shape(out_, *pair.b, "as many rows for gate as for up");
    layer.dtype = dtype_of(*pair.a);
    dtype_of(*pair.b);
    make_room(layer, number, static_cast<size_t>(experts), *pair.a);
    bool apart = rank % 2 == 0 && rank == 2 * rank_in(out_, "down_proj");
    const int64_t half = b.rows / 2;
    std::vector<LoraMatrices> both;
    for (int64_t e = 0; e < experts; ++e) both.push_back(of_expert(a, b, e, experts, rank));
    for (const LoraMatrices& one : both)
      apart = apart && one.b.part(0, half, rank / 2, rank / 2).is_zero() &&
              one.b.part(half, half, 0, rank / 2).is_zero();
    for (size_t e = 0; e < both.size(); ++e) {
      const LoraMatrices& one = both[e];
      for (const size_t part : {kGatePart, kUpPart}) {
        const int64_t row = part == kUpPart ? half : 0, from = apart && part == kUpPart ? rank / 2 : 0,
                      count = apart ? rank / 2 : rank;
        layer.experts[e][part] = LoraMatrices{.a = one.a.part(from, count, 0, one.a.columns),
                                              .b = one.b.part(row, half, from, count)};
      }
    }
  }

  void unpack_one(StoredExperts& layer, int number, const Pair& pair, const char* parameter, size_t part) {
    const int64_t rank = rank_in(out_, parameter), experts = experts_in(layer, pair, rank);
    const LoraView a = view_of(out_, *pair.a), b = view_of(out_, *pair.b);
    layer.dtype = dtype_of(*pair.a);
    dtype_of(*pair.b);
    make_room(layer, number, static_cast<size_t>(experts), *pair.a);
    for (int64_t e = 0; e < experts; ++e)
      layer.experts[static_cast<size_t>(e)][part] = of_expert(a, b, e, experts, rank);
  }

  int64_t rank_of_experts() const {
    for (const auto& part : out_.layers.begin()->second.experts[0])
      if (part) return part->a.rows;
    return 0;
  }

  // All experts of all layers alike, which both layouts need.
  void check() const {
    const auto& first = out_.layers.begin()->second;
    const auto &gate = first.experts[0][kGatePart], &up = first.experts[0][kUpPart];
    if (gate && up && (gate->a.columns != up->a.columns || gate->b.rows != up->b.rows))
      fail("{}: layer {}: gate_proj of {} x {}, up_proj of {} x {}: expected the same", out_.folder,
           out_.layers.begin()->first, gate->b.rows, gate->a.columns, up->b.rows, up->a.columns);
    for (const auto& [number, layer] : out_.layers) {
      if (layer.experts.size() != first.experts.size())
        fail("{}: layer {} has {} experts, layer {} has {}", out_.folder, number, layer.experts.size(),
             out_.layers.begin()->first, first.experts.size());
      for (size_t e = 0; e < layer.experts.size(); ++e)
        for (size_t part = 0; part < 3; ++part) {
          const auto &one = layer.experts[e][part], &model = first.experts[0][part];
          if (one.has_value() != model.has_value() || (one && (!one->a.data || !one->b.data)))
            fail("{}: layer {} expert {} {}: lora_A or lora_B is missing", out_.folder, number, e,
                 kPublishedParts[part]);
          if (one && (one->a.rows != model->a.rows || one->b.columns != one->a.rows ||
                      one->a.columns != model->a.columns || one->b.rows != model->b.rows))
            fail(
                "{}: layer {} expert {} {}: [{}, {}] and [{}, {}], where the first has [{}, {}] and [{}, {}]",
                out_.folder, number, e, kPublishedParts[part], one->a.rows, one->a.columns, one->b.rows,
                one->b.columns, model->a.rows, model->a.columns, model->b.rows, model->b.columns);
        }
    }
  }

  AdapterFiles out_;
  std::map<int, FusedPairs> fused_;
  int per_expert_ = 0;
  std::optional<Dtype> dtype_;
  size_t rooms_ = 0, most_rooms_ = 0;  // experts of all layers
};

}  // namespace

int64_t rank_in(const AdapterFiles& adapter, const std::string& parameter) {
  if (const auto pattern = adapter.config.find("rank_pattern");
      pattern != adapter.config.end() && pattern->is_object())
    for (const auto& [key, value] : pattern->items())
      if (key.find(parameter) != key.npos && value.is_number_integer()) return value.get<int64_t>();
  const auto rank = adapter.config.find("r");
  if (rank == adapter.config.end() || !rank->is_number_integer() || rank->get<int64_t>() < 1)
    fail("{}/{}: no rank r of at least 1", adapter.folder, kAdapterConfigFile);
  return rank->get<int64_t>();
}

AdapterFiles read_adapter(const std::string& folder, std::optional<double> alpha) {
  return AdapterReader(folder, alpha).read();
}

}  // namespace kt::inline weights
