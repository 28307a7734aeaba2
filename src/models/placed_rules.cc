#include "models/placed_rules.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "formats/matrix.h"
#include "models/placement.h"
#include "models/rule_arguments.h"
#include "models/ruled_experts.h"

namespace kt::inline models {
namespace {

// What one module's rule says of a device.
struct SaidDevice {
  size_t module = 0;
  std::string device;
  int rule = 0;
};

class RulePlacer {
 public:
  RulePlacer(RuleFile file, ModuleTree tree, const RuleDefaults& defaults) : defaults_(defaults) {
    if (file.rules.empty())
      out_.matches.rule.assign(tree.modules.size(), RuleMatches::kNone);
    else
      out_.matches = match_rules(file, tree);
    out_.file = std::move(file);
    out_.tree = std::move(tree);
    out_.modules.resize(out_.tree.modules.size());
  }

  PlacedRules place() {
    find_formats();
    if (!defaults_.given) check_gates();
    std::vector<std::string> more = checked_arguments(out_.file, out_.tree, out_.matches);
    find_devices();
    check_transfers();
    if (defaults_.given) {
      fill_given_devices();
    } else {
      settle();
      find_experts();
      fill_devices();
    }
    note_kept();
    std::ranges::move(more, std::back_inserter(out_.notes));
    return std::move(out_);
  }

 private:
  const std::vector<ModelModule>& modules() const { return out_.tree.modules; }
  const Rule& rule_at(int rule) const { return out_.file.rules[static_cast<size_t>(rule)]; }
  const OperatorUse& use_of(int rule) const { return out_.matches.uses[static_cast<size_t>(rule)]; }
  std::string place_of(int rule, size_t module) const {
    return text("{}: {}", out_.file.place(rule_at(rule)), modules()[module].name);
  }
  std::string place_of(const SaidDevice& said) const { return place_of(said.rule, said.module); }
  std::string label_of(const SaidDevice& said) const { return rule_and_line(rule_at(said.rule)); }

  // A module's own rule; of routed experts without one that of each single expert, where all say the same.
  int own_rule(size_t at) const {
    const int rule = out_.matches.rule[at];
    if (rule != RuleMatches::kNone || modules()[at].kind != ModuleKind::kExperts) return rule;
    if (modules()[at].end == at + 1 || modules()[at + 1].kind != ModuleKind::kExpert) return rule;
    const int first = out_.matches.rule[at + 1];
    for (size_t i = at + 1; i < modules()[at].end; ++i) {
      const int other = out_.matches.rule[i];
      if (first < 0 || other < 0 || use_of(other).device != use_of(first).device ||
          use_of(other).format != use_of(first).format)
        return rule;
    }
    return first;
  }

  // Formats, module by module.
  void find_formats() {
    std::vector<size_t> above;  // within the layer, from the outermost
    std::vector<std::string> formats(modules().size());
    for (size_t i = 0; i < modules().size(); ++i) {
      while (!above.empty() && modules()[above.back()].end <= i) above.pop_back();
      PlacedModule& placed = out_.modules[i];
      const int own = own_rule(i);
      placed.rule = own >= 0 ? own : above.empty() ? RuleMatches::kNone : out_.modules[above.back()].rule;
      formats[i] = own >= 0 ? use_of(own).format : above.empty() ? "" : formats[above.back()];
      if (modules()[i].layer >= 0) above.push_back(i);
      round(i, formats[i]);
    }
  }

  struct MatrixShape {
    int64_t n = 0, k = 0;
  };
  std::vector<MatrixShape> shapes_of(const ModelModule& module) const {
    if (module.kind == ModuleKind::kExperts)
      return {{module.n, module.k}, {module.n, module.k}, {module.k, module.n}};
    return {{module.n, module.k}};
  }

  void round(size_t at, const std::string& word) {
    const ModelModule& module = modules()[at];
    PlacedModule& placed = out_.modules[at];
    const bool matrix = module.kind == ModuleKind::kLinear || module.kind == ModuleKind::kRouter ||
                        module.kind == ModuleKind::kEmbedding;
    if (!matrix && module.kind != ModuleKind::kExperts) return;
    const std::vector<MatrixShape> shapes = shapes_of(module);
    placed.rounded.resize(shapes.size());
    const bool asks = !word.empty() && word != "stored";
    if (module.exact || module.kind == ModuleKind::kEmbedding) {
      if (asks) exact_.push_back(at);
      return;
    }
    const auto& flag = module.kind == ModuleKind::kExperts ? defaults_.experts : defaults_.linears;
    if (word == "stored" || (word.empty() && !flag)) return;
    const Format wanted = asks ? format_named(word) : *flag;
    for (size_t m = 0; m < shapes.size(); ++m) {
      const Format* const stored = m < module.formats.size() ? &module.formats[m] : nullptr;
      if (stored && *stored == wanted) continue;
      const bool again = placed.rule >= 0 && use_of(placed.rule).rounds_again;
      if (asks && !again && stored && stays(*stored, shapes[m], wanted, at)) continue;
      if (asks) check_fit(at, wanted, shapes[m]);
      placed.rounded[m] = wanted;
      placed.by_flag = !asks;
    }
  }

  // Whether a rule leaves a stored matrix what it is.
  bool stays(const Format& stored, const MatrixShape& shape, const Format& wanted, size_t at) {
    if (wanted == format_named("fp8") && stored.code == wanted.code) return true;
    if (stored_bits(stored, shape.n, shape.k) >= kLeastRoundedBits) return false;
    kept_.insert(at);
    return true;
  }

  void check_fit(size_t at, const Format& wanted, const MatrixShape& shape) const {
    try {
      check_shape(wanted, shape.n, shape.k, modules()[at].name);
    } catch (const Error& error) {
      throw Error(error.kind(),
                  text("{}: {}", out_.file.place(rule_at(out_.modules[at].rule)), error.what()));
    }
  }

  // "int8", or how it is stored.
  std::string final_format(size_t at) const {
    const auto& rounded = out_.modules[at].rounded.front();
    return rounded ? name_of(*rounded) : modules()[at].stored;
  }

  // Gate and up of an MLP are multiplied together: alike, unless they are stored otherwise.
  void check_gates() const {
    for (size_t i = 0; i < modules().size(); ++i) {
      if (modules()[i].kind != ModuleKind::kMlp) continue;
      const size_t gate = i + 1, up = i + 2;
      if (final_format(gate) == final_format(up) || modules()[gate].formats != modules()[up].formats)
        continue;
      const size_t which = out_.modules[up].rule >= 0 ? up : gate, other = which == up ? gate : up;
      if (out_.modules[which].rule < 0) continue;
      fail("{}: becomes {}, and {}, which it is multiplied with, {}: gate and up are alike",
           place_of(out_.modules[which].rule, which), final_format(which), modules()[other].name,
           final_format(other));
    }
  }

  // Devices.
  std::optional<SaidDevice> said(size_t at) const {
    const int rule = own_rule(at);
    if (rule < 0 || use_of(rule).device.empty()) return {};
    SaidDevice out{.module = at, .device = use_of(rule).device, .rule = rule};
    if (out.device.starts_with("xpu") || out.device.starts_with("npu"))
      fail(
          "{}: on {}: models run on the CPU and on CUDA devices; `rule_devices` {}=cuda:0 or {}=cpu says "
          "where",
          place_of(out), out.device, out.device, out.device);
    if (out.device == "cuda") out.device = "cuda:0";
    return out;
  }

  // One of a part that lies in one place.
  void agree(std::optional<SaidDevice>& all, size_t at, std::string_view what) const {
    const std::optional<SaidDevice> one = said(at);
    if (!one) return;
    if (all && all->device != one->device)
      fail("{}: on {}, and {} of the same layer is on {} ({}): {}", place_of(*one), one->device,
           modules()[all->module].name, all->device, label_of(*all), what);
    if (!all) all = one;
  }

  struct LayerDevices {
    size_t module = 0;  // the layer
    std::optional<SaidDevice> dense, mlp, experts;
    size_t experts_module = 0;             // 0: it has none
    std::vector<SaidDevice> singles = {};  // experts with a rule of their own
  };

  void find_devices() {
    for (size_t i = 0; i < modules().size(); ++i) {
      if (modules()[i].kind != ModuleKind::kLayer) continue;
      layers_.push_back(devices_of_layer(i));
      check_layer(layers_.back());
      i = modules()[i].end - 1;
    }
    for (size_t i = 0; i < modules().size(); ++i) {
      if (modules()[i].part == ModulePart::kFinalNorm || modules()[i].part == ModulePart::kHead)
        if (const auto one = said(i)) beside_.push_back(*one);
      if (modules()[i].kind != ModuleKind::kEmbedding) continue;
      if (const auto one = said(i); one && one->device != "cpu" && !defaults_.given)
        out_.notes.push_back(text("{}: on {}: its rows are read on the host", place_of(*one), one->device));
    }
  }

  LayerDevices devices_of_layer(size_t layer) const {
    LayerDevices out{.module = layer, .dense = {}, .mlp = {}, .experts = {}};
    for (size_t i = layer + 1; i < modules()[layer].end; ++i) switch (modules()[i].part) {
        case ModulePart::kMlp:
        case ModulePart::kShared:
          agree(out.mlp, i, "the matrices of an MLP lie together");
          break;
        case ModulePart::kExperts:
          add_experts(out, i);
          break;
        default:
          agree(out.dense, i, "attention, router and norms of a layer lie together");
      }
    for (std::optional<SaidDevice>* part : {&out.dense, &out.mlp, &out.experts})
      if (!*part && (part != &out.experts || !has_copies(out))) *part = said(layer);
    return out;
  }

  // Whether a rule says how many copies of them a GPU has, which tells their home.
  bool has_copies(const LayerDevices& layer) const {
    const int rule = layer.experts_module == 0 ? RuleMatches::kNone : own_rule(layer.experts_module);
    return rule >= 0 && rule_at(rule).kwargs.contains("gpu_experts");
  }

  void add_experts(LayerDevices& out, size_t at) const {
    if (modules()[at].kind == ModuleKind::kExperts) {
      check_single_formats(at);
      out.experts_module = at;
      out.experts = said(at);
    } else if (out_.matches.rule[at] != own_rule(out.experts_module)) {
      if (const auto single = said(at)) out.singles.push_back(*single);
    }
  }

  // Single experts have the format of the others.
  void check_single_formats(size_t experts) const {
    const int of_all = own_rule(experts);
    const OperatorUse nothing, &all = of_all >= 0 ? use_of(of_all) : nothing;
    for (size_t i = experts + 1; i < modules()[experts].end; ++i) {
      const int rule = out_.matches.rule[i];
      if (rule < 0 || rule == of_all || modules()[i].kind != ModuleKind::kExpert) continue;
      const OperatorUse& one = use_of(rule);
      const bool elsewhere = defaults_.given && one.device != all.device;
      if (!elsewhere && (one.format.empty() || one.format == all.format)) continue;
      fail_as(ErrorKind::kUnsupported,
              "{}: experts of a layer have one {} so far: {} of single ones is not there yet{}",
              place_of(rule, i), elsewhere ? "device" : "format", elsewhere ? "a device" : one.format,
              of_all >= 0 ? text("; recursive: false in {} leaves them to it", rule_at(of_all).label()) : "");
    }
  }

  void check_layer(const LayerDevices& layer) const {
    if (!layer.dense) return;
    const std::string& device = layer.dense->device;
    const auto check = [&](const std::optional<SaidDevice>& part, std::string_view what) {
      if (part && part->device != "cpu" && part->device != device)
        fail("{}: on {}, and its layer is on {} ({}): {} lie there or on the CPU", place_of(*part),
             part->device, device, label_of(*layer.dense), what);
    };
    check(layer.mlp, "an MLP and a shared expert");
    check(layer.experts, "routed experts");
    for (const SaidDevice& single : layer.singles) check(single, "routed experts");
  }

  // What transfer_map says against where layers are.
  void check_transfers() {
    const std::set<int> busy(out_.matches.rule.begin(), out_.matches.rule.end());
    for (const int rule : busy) {
      if (rule < 0 || rule_at(rule).own || !rule_at(rule).kwargs.contains("transfer_map")) continue;
      const std::string place = out_.file.place(rule_at(rule), rule_at(rule).line_of_kwarg("transfer_map")) +
                                ": kwargs: transfer_map";
      std::vector<int> behind;
      for (const auto& [key, value] : rule_at(rule).kwargs["transfer_map"].items()) {
        const int layer = std::stoi(key);
        std::string device = out_.file.device(value.get<std::string>());
        if (device == "cuda") device = "cuda:0";
        if (layer >= std::ssize(layers_)) {
          behind.push_back(layer);
          continue;
        }
        const LayerDevices& at = layers_[static_cast<size_t>(layer)];
        if (at.dense && at.dense->device != device)
          fail("{}: layer {} on {}, and {} is on {} ({})", place, layer, device, modules()[at.module].name,
               at.dense->device, label_of(*at.dense));
      }
      std::ranges::sort(behind);
      if (!behind.empty())
        out_.notes.push_back(
            text("{}: behind the last layer, {}: {}", place, std::ssize(layers_) - 1, ranges_text(behind)));
    }
  }

  // Which GPU a device is, or kOnHost.
  static int number_of(const std::string& device) {
    return device == "cpu" ? kOnHost : std::stoi(device.substr(device.find(':') + 1));
  }

  // Where a layer is run: its attention says so, else whatever of it lies on a GPU, else its MLP.
  static std::optional<SaidDevice> home_of(const LayerDevices& layer) {
    if (layer.dense) return layer.dense;
    if (layer.mlp && layer.mlp->device != "cpu") return layer.mlp;
    if (layer.experts && layer.experts->device != "cpu") return layer.experts;
    for (const SaidDevice& single : layer.singles)
      if (single.device != "cpu") return single;
    return layer.mlp;
  }

  // An MLP lies where its layer does, and so do routed experts that are on a GPU, so far.
  void check_home(const LayerDevices& layer, const SaidDevice& home) const {
    if (layer.mlp && layer.mlp->device != home.device)
      fail_as(
          ErrorKind::kUnsupported,
          "{}: on {}, and {} of the same layer is on {} ({}): dense parts of a layer in two places are not "
          "there yet",
          place_of(*layer.mlp), layer.mlp->device, modules()[home.module].name, home.device, label_of(home));
    const auto check = [&](const SaidDevice& part) {
      if (part.device != "cpu" && part.device != home.device)
        fail("{}: on {}, and its layer is on {} ({}): routed experts lie there or on the CPU", place_of(part),
             part.device, home.device, label_of(home));
    };
    if (layer.experts) check(*layer.experts);
    for (const SaidDevice& single : layer.singles) check(single);
  }

  // The last norm and the head lie together.
  std::optional<SaidDevice> head_device() const {
    for (const SaidDevice& one : beside_)
      if (one.device != beside_.front().device)
        fail_as(ErrorKind::kUnsupported,
                "{}: on {}, and {} is on {} ({}): the last norm and the head in two places are not there yet",
                place_of(one), one.device, modules()[beside_.front().module].name, beside_.front().device,
                label_of(beside_.front()));
    return beside_.empty() ? std::nullopt : std::optional(beside_.front());
  }

  // Whole layers in places: a layer that no rule names follows the last one before it whose rule names a GPU, where one
  // does.
  void settle() {
    std::optional<SaidDevice> gpu, cpu, mlp_alone;
    const auto see = [&](const SaidDevice& one) {
      if (one.device == "cpu") {
        if (!cpu) cpu = one;
        return kOnHost;
      }
      const int number = number_of(one.device);
      if (!gpu || number > number_of(gpu->device)) gpu = one;
      return number;
    };
    if (const auto head = head_device()) out_.head_on = see(*head);
    out_.layers_on.assign(layers_.size(), kUndecided);
    for (size_t i = 0; i < layers_.size(); ++i) {
      const std::optional<SaidDevice> home = home_of(layers_[i]);
      if (!home) continue;
      check_home(layers_[i], *home);
      if (!layers_[i].dense && home->device == "cpu" && !mlp_alone) mlp_alone = home;
      out_.layers_on[i] = see(*home);
    }
    if (mlp_alone && (gpu || defaults_.gpu))
      fail_as(ErrorKind::kUnsupported,
              "{}: on the CPU, and no rule has its layer there: dense parts of a layer in two places are not "
              "there "
              "yet",
              place_of(*mlp_alone));
    if (gpu) {
      out_.dense = PlacedRules::Dense::kGpu;
      out_.gpu_from = place_of(*gpu);
      out_.gpus = number_of(gpu->device) + 1;
      follow_neighbours();
    } else if (cpu) {
      const bool rest = std::ranges::find(out_.layers_on, kUndecided) != out_.layers_on.end();
      out_.dense = defaults_.gpu && rest ? PlacedRules::Dense::kAsFlagsSay : PlacedRules::Dense::kCpu;
    }
  }

  void follow_neighbours() {
    const auto on_gpu = [](int device) { return device >= 0; };
    const auto first = std::ranges::find_if(out_.layers_on, on_gpu);
    if (first == out_.layers_on.end()) return;
    int last = *first;
    for (int& device : out_.layers_on) {
      if (device == kUndecided) device = last;
      if (device >= 0) last = device;
    }
  }

  void find_experts() {
    std::vector<RuledLayer> all;
    for (const LayerDevices& layer : layers_) {
      if (layer.experts_module == 0) continue;
      RuledLayer& one = all.emplace_back(RuledLayer{.module = layer.experts_module});
      one.rule = own_rule(layer.experts_module);
      if (one.rule < 0 && layer.experts) one.rule = layer.experts->rule;
      one.on_gpu = layer.experts && layer.experts->device != "cpu";
      one.layer_on_cpu = out_.dense == PlacedRules::Dense::kCpu ||
                         out_.layers_on[static_cast<size_t>(&layer - layers_.data())] == kOnHost;
      for (const SaidDevice& single : layer.singles)
        if ((single.device != "cpu") != one.on_gpu)
          one.singles.push_back({.expert = modules()[single.module].expert,
                                 .rule = single.rule,
                                 .on_gpu = single.device != "cpu"});
      if (one.on_gpu && one.singles.empty()) whole_on_gpu_.insert(layer.experts_module);
    }
    out_.experts = expert_rules(out_.file, out_.tree, all);
  }

  static std::string device_text(int device) {
    return device == kUndecided ? "" : device == kOnHost ? "cpu" : text("cuda:{}", device);
  }

  void fill_devices() {
    for (size_t i = 0; i < modules().size(); ++i) {
      const int layer = modules()[i].layer;
      const int there = out_.dense == PlacedRules::Dense::kCpu ? kOnHost
                        : layer >= 0                           ? out_.layers_on[static_cast<size_t>(layer)]
                                                               : out_.head_on;
      out_.modules[i].device = modules()[i].kind == ModuleKind::kEmbedding ? "host"
                               : whole_on_gpu_.contains(i)                 ? device_text(there)
                               : modules()[i].part == ModulePart::kExperts ? "cpu"
                                                                           : device_text(there);
    }
  }

  // A module's own device, else that of its part of the layer.
  void fill_given_devices() {
    for (size_t i = 0; i < modules().size(); ++i)
      if (const auto one = said(i)) {
        const bool rows = modules()[i].kind == ModuleKind::kEmbedding && one->device == "cpu";
        out_.modules[i].device = rows ? "host" : one->device;
      }
    for (const LayerDevices& layer : layers_)
      for (size_t i = layer.module; i < modules()[layer.module].end; ++i) {
        const ModulePart part = modules()[i].part;
        const bool mlp = part == ModulePart::kMlp || part == ModulePart::kShared;
        const auto& all = part == ModulePart::kExperts ? layer.experts : mlp ? layer.mlp : layer.dense;
        if (out_.modules[i].device.empty() && all) out_.modules[i].device = all->device;
      }
  }

  void note_kept() {
    std::set<int> exact, kept;
    for (const size_t at : exact_) exact.insert(out_.modules[at].rule);
    for (const size_t at : kept_) kept.insert(out_.modules[at].rule);
    if (!exact.empty())
      out_.notes.push_back(
          text("{}: {} kept as stored: the embedding, routers, gates of shared experts and "
               "kv_b are not rounded ({})",
               out_.file.name, others_too(modules()[exact_.front()].name, exact_.size()),
               out_.file.labels(exact)));
    if (!kept.empty())
      out_.notes.push_back(text("{}: {} kept as stored: below {} bits a weight nothing is rounded again ({})",
                                out_.file.name, others_too(modules()[*kept_.begin()].name, kept_.size()),
                                kLeastRoundedBits, out_.file.labels(kept)));
  }

  static std::string others_too(const std::string& name, size_t count) {
    return count == 1 ? name + " is" : text("{} and {} more are", name, count - 1);
  }

  const RuleDefaults& defaults_;
  PlacedRules out_;
  std::vector<LayerDevices> layers_;
  std::set<size_t> whole_on_gpu_;   // routed experts of layers
  std::vector<SaidDevice> beside_;  // the last norm and the head
  std::vector<size_t> exact_;       // modules that a rule would round, and nothing does
  std::set<size_t> kept_;           // modules of few bits that stay
};

}  // namespace

PlacedRules with_devices(PlacedRules placed, const Placement& beside_gpu) {
  for (size_t i = 0; i < placed.modules.size(); ++i) {
    if (!placed.modules[i].device.empty()) continue;
    const int layer = placed.tree.modules[i].layer;
    placed.modules[i].device = beside_gpu.device_of(
        layer < 0 ? beside_gpu.head.place : beside_gpu.layers[static_cast<size_t>(layer)].dense.place);
  }
  return placed;
}

LinearFormats PlacedRules::linear_formats() const {
  LinearFormats out;
  for (size_t i = 0; i < modules.size(); ++i)
    if (tree.modules[i].kind == ModuleKind::kLinear && modules[i].rounded.front())
      out.emplace(tree.modules[i].name, *modules[i].rounded.front());
  return out;
}

ExpertFormats PlacedRules::expert_formats() const {
  ExpertFormats out;
  for (size_t i = 0; i < modules.size(); ++i) {
    if (tree.modules[i].kind != ModuleKind::kExperts) continue;
    out.resize(static_cast<size_t>(tree.modules[i].layer) + 1);
    std::ranges::copy(modules[i].rounded, out.back().begin());
  }
  return out;
}

PlacedRules place_by_rules(RuleFile file, ModuleTree tree, const RuleDefaults& defaults) {
  return RulePlacer(std::move(file), std::move(tree), defaults).place();
}

}  // namespace kt::inline models
