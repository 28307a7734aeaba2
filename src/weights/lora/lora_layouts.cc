#include "weights/lora/lora_layouts.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/error.h"
#include "text/shown.h"
#include "weights/lora/expert_lora.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;

// One tensor of the output, filled when it is written.
struct LoraPiece {
  TensorSpec spec;
  std::vector<LoraView> views;  // one below the other, or, `across`, one beside the other
  bool across = false;
  const Tensor* copied = nullptr;
};

std::vector<std::byte> lora_bytes(const LoraPiece& piece) {
  std::vector<std::byte> out(byte_count(piece.spec));
  if (piece.copied) {
    std::ranges::copy(piece.copied->bytes, out.begin());
    return out;
  }
  const int64_t width = piece.spec.shape[1];
  int64_t row = 0, column = 0;
  for (const LoraView& view : piece.views) {
    for (int64_t r = 0; r < view.rows; ++r)
      for (int64_t c = 0; c < view.columns; ++c)
        std::memcpy(out.data() + static_cast<size_t>((row + r) * width + column + c) * view.size,
                    view.at(r, c), view.size);
    (piece.across ? column : row) += piece.across ? view.columns : view.rows;
  }
  return out;
}

class LoraExporter {
 public:
  LoraExporter(const LoraExport& request, AdapterFiles adapter)
      : request_(request), adapter_(std::move(adapter)) {
    out_.found = adapter_.found;
    if (!adapter_.other_tensors.empty()) out_.beside = kOtherExpertsFile;
    out_.layers = static_cast<int>(adapter_.layers.size());
    out_.experts = static_cast<int>(first().experts.size());
  }

  LoraExported run() {
    const bool rest = request_.share != LoraShare::kExperts, experts = request_.share != LoraShare::kRest;
    if (!experts && adapter_.rest.empty()) fail("{}: has nothing but routed experts", adapter_.folder);
    for (const Tensor* tensor : adapter_.rest)
      if (rest)
        pieces_.push_back({.spec = {.name = tensor->name, .dtype = tensor->dtype, .shape = tensor->shape},
                           .views = {},
                           .copied = tensor});
    for (const auto& [number, layer] : adapter_.layers)
      if (experts) request_.layout == LoraLayout::kPerExpert ? add_experts(layer) : add_fused(layer);
    std::ranges::sort(pieces_, {}, [](const LoraPiece& piece) { return piece.spec.name; });
    write();
    return out_;
  }

 private:
  const StoredExperts& first() const { return adapter_.layers.begin()->second; }
  const std::optional<LoraMatrices>& model_of(size_t part) const { return first().experts[0][part]; }

  // "model.layers.0.block_sparse_moe.experts.0.w1" of families whose published names are those.
  bool has_numbered_names() const {
    const auto base = adapter_.config.find("base_model_name_or_path");
    if (base == adapter_.config.end() || !base->is_string()) return false;
    const std::string path = base->get<std::string>() + "/config.json";
    std::error_code ignored;
    if (!fs::exists(path, ignored)) return first().prefix.find("block_sparse_moe") != std::string::npos;
    const Json type = read_json(path).value("model_type", Json());
    return type == "mixtral" || type == "minimax" || type == "minimax_m2" || type == "phimoe";
  }

  void add_experts(const StoredExperts& layer) {
    const bool numbered = has_numbered_names();
    std::string prefix = layer.prefix;
    constexpr std::string_view kBlock = ".mlp.experts";
    if (numbered && prefix.ends_with(kBlock))
      prefix.replace(prefix.size() - kBlock.size(), kBlock.size(), ".block_sparse_moe.experts");
    for (size_t e = 0; e < layer.experts.size(); ++e)
      for (size_t part = 0; part < 3; ++part) {
        const auto& factors = layer.experts[e][part];
        if (!factors) continue;
        const std::string at =
            text("{}.{}.{}", prefix, e, numbered ? kNumberedParts[part] : kPublishedParts[part]);
        add(at + ".lora_A.weight", layer.dtype, {factors->a});
        add(at + ".lora_B.weight", layer.dtype, {factors->b});
      }
    if (model_of(kGatePart)) out_.gate_up_rank = static_cast<int>(model_of(kGatePart)->a.rows);
    if (model_of(kDownPart)) out_.down_rank = static_cast<int>(model_of(kDownPart)->a.rows);
  }

  void add(std::string name, Dtype dtype, std::vector<LoraView> views) {
    int64_t rows = 0;
    for (const LoraView& view : views) rows += view.rows;
    const int64_t columns = views[0].columns;
    pieces_.push_back({.spec = {.name = std::move(name), .dtype = dtype, .shape = {rows, columns}},
                       .views = std::move(views)});
  }

  // Gate and up with the same A everywhere keep their rank; else one of twice the rank is both.
  bool shares_a() const {
    if (shares_) return *shares_;
    bool all = true;
    for (const auto& [number, layer] : adapter_.layers)
      for (const auto& expert : layer.experts) all = all && expert[kGatePart]->a.equals(expert[kUpPart]->a);
    shares_ = all;
    return all;
  }

  void add_fused(const StoredExperts& layer) {
    const bool gate = model_of(kGatePart).has_value(), up = model_of(kUpPart).has_value(),
               down = model_of(kDownPart).has_value();
    if (gate != up)
      fail("{}: experts have LoRA on {} alone; a fused one is of gate and up", adapter_.folder,
           gate ? "gate" : "up");
    std::string prefix = layer.prefix;
    if (const size_t at = prefix.rfind("block_sparse_moe"); at != prefix.npos) prefix.replace(at, 16, "mlp");
    if (gate) add_gate_up(layer, prefix + (down ? ".base_layer" : ""));
    if (!down) return;
    std::vector<LoraView> a;
    for (const auto& expert : layer.experts) a.push_back(expert[kDownPart]->a);
    add(prefix + ".lora_A.weight", layer.dtype, std::move(a));
    std::vector<LoraView> b;  // columns: rank after rank, in each expert after expert
    const int64_t rank = model_of(kDownPart)->a.rows;
    for (int64_t r = 0; r < rank; ++r)
      for (const auto& expert : layer.experts)
        b.push_back(expert[kDownPart]->b.part(0, expert[kDownPart]->b.rows, r, 1));
    add_across(prefix + ".lora_B.weight", layer.dtype, std::move(b));
    out_.down_rank = static_cast<int>(rank);
  }

  void add_across(std::string name, Dtype dtype, std::vector<LoraView> views) {
    int64_t columns = 0;
    for (const LoraView& view : views) columns += view.columns;
    const int64_t rows = views[0].rows;
    pieces_.push_back({.spec = {.name = std::move(name), .dtype = dtype, .shape = {rows, columns}},
                       .views = std::move(views),
                       .across = true});
  }

  void add_gate_up(const StoredExperts& layer, const std::string& prefix) {
    const bool shared = shares_a();
    const int64_t rank = model_of(kGatePart)->a.rows, inter = model_of(kGatePart)->b.rows,
                  fused = shared ? rank : rank + model_of(kUpPart)->a.rows;
    if (!shared && model_of(kUpPart)->a.rows != rank)
      fail("{}: gate has rank {}, up has {}; a fused one is of the same", adapter_.folder, rank,
           model_of(kUpPart)->a.rows);
    std::vector<LoraView> a;
    for (const auto& expert : layer.experts) {
      a.push_back(expert[kGatePart]->a);
      if (!shared) a.push_back(expert[kUpPart]->a);
    }
    add(prefix + ".lora_A.weight", layer.dtype, std::move(a));
    // B has both, one below the other: filled here, because its zeros are in no tensor.
    const size_t size = static_cast<size_t>(dtype_bits(layer.dtype)) / 8;
    const auto experts = static_cast<int64_t>(layer.experts.size());
    std::vector<std::byte>& made =
        made_.emplace_back(static_cast<size_t>(2 * inter * fused * experts) * size);
    for (int64_t e = 0; e < experts; ++e)
      for (const size_t part : {kGatePart, kUpPart}) {
        const LoraView& b = layer.experts[static_cast<size_t>(e)][part]->b;
        const int64_t row = part == kUpPart ? inter : 0, from = !shared && part == kUpPart ? rank : 0;
        for (int64_t o = 0; o < inter; ++o)
          for (int64_t r = 0; r < rank; ++r)
            std::memcpy(
                made.data() +
                    static_cast<size_t>((row + o) * fused * experts + (from + r) * experts + e) * size,
                b.at(o, r), size);
      }
    add(prefix + ".lora_B.weight", layer.dtype,
        {LoraView{.data = made.data(),
                  .rows = 2 * inter,
                  .columns = fused * experts,
                  .row_stride = fused * experts,
                  .size = size}});
    out_.gate_up_rank = static_cast<int>(fused);
  }

  // What PEFT has to know to load it.
  Json config() const {
    Json out = adapter_.config;
    std::set<std::string> modules = names_in(out, "target_modules"),
                          parameters = names_in(out, "target_parameters");
    if (!request_.base_model.empty()) out["base_model_name_or_path"] = request_.base_model;
    const bool numbered = request_.layout == LoraLayout::kPerExpert && has_numbered_names(),
               experts = request_.share != LoraShare::kRest;
    if (request_.share == LoraShare::kExperts) {
      modules.clear();
      parameters.clear();
    }
    for (size_t part = 0; part < 3; ++part) {
      modules.erase(kPublishedParts[part]);
      modules.erase(kNumberedParts[part]);
      if (experts && request_.layout == LoraLayout::kPerExpert && model_of(part))
        modules.insert(numbered ? kNumberedParts[part] : kPublishedParts[part]);
    }
    std::erase_if(parameters, [](const std::string& name) {
      return name.find("experts.gate_up_proj") != name.npos || name.find("experts.down_proj") != name.npos ||
             name == "gate_up_proj" || name == "down_proj";
    });
    if (!experts) add_rest_names(modules);
    if (experts && request_.layout == LoraLayout::kFused) {
      if (model_of(kGatePart)) parameters.insert("mlp.experts.gate_up_proj");
      if (model_of(kDownPart)) parameters.insert("mlp.experts.down_proj");
    }
    out["target_modules"] = modules;
    out["target_parameters"] = parameters.empty() ? Json() : Json(parameters);
    set_ranks(out);
    return out;
  }

  // "q_proj" of "....self_attn.q_proj.lora_A.weight".
  void add_rest_names(std::set<std::string>& modules) const {
    for (const Tensor* const tensor : adapter_.rest) {
      const std::string module = tensor->name.substr(0, tensor->name.find(".lora_"));
      modules.insert(module.substr(module.rfind('.') + 1));
    }
  }

  static std::set<std::string> names_in(const Json& config, const char* key) {
    std::set<std::string> out;
    const auto found = config.find(key);
    if (found == config.end() || found->is_null()) return out;
    if (!found->is_array())
      fail("{}: {}: expected a list of names, found {}", kAdapterConfigFile, key, shown(found->dump()));
    for (const Json& one : *found)
      if (one.is_string()) out.insert(one.get<std::string>());
    return out;
  }

  // Ranks that differ from r, and alphas that keep alpha / rank as it was.
  void set_ranks(Json& config) const {
    const int64_t plain = rank_of_plain();
    const double alpha = config.value("lora_alpha", Json(plain)).is_number()
                             ? config.value("lora_alpha", Json(plain)).get<double>()
                             : 1.0;
    for (const char* const key : {"rank_pattern", "alpha_pattern"}) {
      Json kept = Json::object();
      if (config.contains(key) && config[key].is_object())
        for (const auto& [name, value] : config[key].items())
          if (name.find("gate_up_proj") == name.npos && name.find("experts") == name.npos &&
              name.find("down_proj") == name.npos)
            kept[name] = value;
      config[key] = kept;
    }
    const auto put = [&](const std::string& name, int64_t rank, int64_t before) {
      if (rank == plain || rank == 0) return;
      if (config.value("use_rslora", Json(false)) == true)
        fail("{}: use_rslora divides by the root of the rank, and the rank of experts changes from {} to {}",
             adapter_.folder, before, rank);
      config["rank_pattern"][name] = rank;
      const double scaled = alpha * static_cast<double>(rank) / static_cast<double>(plain);
      config["alpha_pattern"][name] = scaled == static_cast<double>(static_cast<int64_t>(scaled))
                                          ? Json(static_cast<int64_t>(scaled))
                                          : Json(scaled);
    };
    if (request_.layout == LoraLayout::kFused) {
      put(".*\\.gate_up_proj", out_.gate_up_rank, plain);
      if (out_.down_rank != plain) put(".*\\.experts\\.down_proj", out_.down_rank, plain);
      return;
    }
    if (out_.gate_up_rank != plain || (out_.down_rank != 0 && out_.down_rank != plain))
      for (size_t part = 0; part < 3; ++part)
        put(text(".*\\.experts\\.\\d+\\.{}", kPublishedParts[part]),
            part == kDownPart ? out_.down_rank : out_.gate_up_rank, plain);
  }

  int64_t rank_of_plain() const { return adapter_.config.at("r").get<int64_t>(); }

  void write() {
    std::error_code ignored;
    if (fs::exists(request_.to, ignored) && !fs::is_empty(request_.to, ignored) && !request_.overwrite)
      fail("{}: is not empty; `overwrite` writes there", request_.to);
    if (fs::exists(request_.to, ignored) && fs::equivalent(request_.to, adapter_.folder, ignored))
      fail("{}: the adapter's own folder; name another", request_.to);
    const std::string settings = config().dump(2) + "\n";
    fs::create_directories(request_.to);
    std::vector<TensorSpec> specs;
    for (const LoraPiece& piece : pieces_) specs.push_back(piece.spec);
    SafetensorsWriter writer(request_.to + "/" + kAdapterModelFile, specs, {{"format", "pt"}});
    for (size_t i = 0; i < pieces_.size(); ++i) writer.write(i, 0, lora_bytes(pieces_[i]));
    out_.tensors = pieces_.size();
    out_.bytes = writer.size();
    writer.commit();
    write_atomically(request_.to + "/" + kAdapterConfigFile, settings);
    copy_small_files();
  }

  // Tokenizer and template, which engines look for beside an adapter.
  void copy_small_files() const {
    for (const auto& entry : fs::directory_iterator(adapter_.folder)) {
      const std::string name = entry.path().filename().string();
      const bool wanted =
          name == "chat_template.jinja" || name.starts_with("tokenizer") || name == "special_tokens_map.json";
      if (!wanted || !entry.is_regular_file()) continue;
      write_atomically(request_.to + "/" + name, read_file(entry.path().string(), kSmallFile));
    }
  }

  LoraExport request_;
  AdapterFiles adapter_;
  std::vector<LoraPiece> pieces_;
  std::vector<std::vector<std::byte>> made_;
  mutable std::optional<bool> shares_;
  LoraExported out_;
};

}  // namespace

LoraExported export_lora(const LoraExport& request) {
  return LoraExporter(request, read_adapter(request.from, request.alpha)).run();
}

}  // namespace kt::inline weights
