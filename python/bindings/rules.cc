// Placement rules for models of torch: the reader, the matcher and the placer of models/ over a tree that the caller
// gives. Trees and answers cross as JSON text: they are small, and made once for a model.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "hybrid/shared_experts.h"
#include "models/families.h"
#include "models/given_tree.h"
#include "models/placed_rules.h"
#include "text/json.h"

namespace kt::python {
namespace {

GivenModule module_of(const Json& given) {
  return {.name = given.at("name").get<std::string>(),
          .classes = given.at("classes").get<std::vector<std::string>>(),
          .experts = given.value("experts", int64_t{0}),
          .shape = given.value("shape", std::vector<int64_t>{}),
          .bias = given.value("bias", false),
          .stored = given.value("stored", std::string())};
}

// Formats as a checkpoint or kt weights have them, in place of those of the numbers that torch has.
void add_formats_under(ModuleTree& tree, const std::string& path) {
  bool experts = false;
  for (ModelModule& module : tree.modules) experts |= module.kind == ModuleKind::kExperts;
  const auto source = experts ? shared_experts(path) : nullptr;
  if (source && is_kt_weights(path)) {
    for (ModelModule& module : tree.modules) {
      if (module.kind != ModuleKind::kExperts) continue;
      module.formats.clear();
      for (const Projection projection : kProjections)
        module.formats.push_back(source->at(module.layer, 0, projection)->format);
      module.stored = name_of(module.formats.front());
    }
    return;
  }
  add_stored_formats(tree, Checkpoint(path, gguf_families()), source.get());
}

OrderedJson decision(const PlacedRules& placed, size_t at) {
  const PlacedModule& module = placed.modules[at];
  const int rule = placed.matches.rule[at];
  OrderedJson formats = OrderedJson::array(), stored = OrderedJson::array();
  for (const auto& format : module.rounded)
    formats.push_back(format ? OrderedJson(name_of(*format)) : OrderedJson());
  for (const Format& format : placed.tree.modules[at].formats) stored.push_back(name_of(format));
  OrderedJson out = {{"rule", rule},
                     {"decided", module.rule},
                     {"device", module.device},
                     {"formats", std::move(formats)},
                     {"stored", std::move(stored)}};
  if (rule >= 0) {
    const OperatorUse& use = placed.matches.uses[static_cast<size_t>(rule)];
    out["operator"] = use.name;
    out["what"] = use.what == Replaces::kLinears   ? "linears"
                  : use.what == Replaces::kExperts ? "experts"
                                                   : "";
    out["op"] = use.op;
  }
  return out;
}

// Words that are devices, below lists and mappings too, as `rule_devices` renames them.
Json renamed(const RuleFile& file, const Json& value) {
  if (value.is_string()) {
    const auto word = value.get<std::string>();
    return is_device(word) ? Json(file.device(word)) : value;
  }
  Json out = value;
  if (value.is_structured())
    for (auto& item : out.items()) item.value() = renamed(file, item.value());
  return out;
}

class Rules {
 public:
  Rules(const std::string& path, const std::vector<std::string>& place, const std::string& devices) {
    auto read = without_gil([&] { return read_rules({.file = path, .place = place, .devices = devices}); });
    if (!read) fail("rules: expected a file or `place`");
    file_ = std::move(*read);
  }

  // Of each rule: what it puts there, as written, and whether that is an operator of ours.
  std::vector<std::tuple<std::string, bool>> operators() const {
    std::vector<std::tuple<std::string, bool>> out;
    for (const Rule& rule : file_.rules) out.emplace_back(rule.replace, is_operator(rule.replace));
    return out;
  }

  void set_own(const std::vector<size_t>& rules) {
    for (const size_t rule : rules) file_.rules.at(rule).own = true;
  }

  std::string kwargs(size_t rule) const { return renamed(file_, file_.rules.at(rule).kwargs).dump(); }
  std::string where(size_t rule) const { return file_.place(file_.rules.at(rule)); }
  bool recursive(size_t rule) const { return file_.rules.at(rule).recursive; }

  std::string place(const std::string& given) const {
    return without_gil([&] {
      const Json request = parse_json(given, "the model's modules", {.depth = 8});
      std::vector<GivenModule> modules;
      for (const Json& each : request.at("modules")) modules.push_back(module_of(each));
      ModuleTree tree = given_tree(request.at("family").get<std::string>(), modules);
      if (const auto path = request.value("weights", std::string()); !path.empty())
        add_formats_under(tree, path);
      const PlacedRules placed = place_by_rules(file_, std::move(tree), {.given = true});
      OrderedJson decisions = OrderedJson::array();
      for (size_t i = 0; i < modules.size(); ++i) decisions.push_back(decision(placed, i));
      const bool on_gpu = request.value("on_gpu", false);
      return OrderedJson{{"modules", std::move(decisions)},
                         {"plan", json_of(placed, on_gpu)},
                         {"text", describe(placed, on_gpu)}}
          .dump();
    });
  }

 private:
  RuleFile file_;
};

}  // namespace

void add_rules(nb::module_& module) {
  nb::class_<Rules>(module, "Rules", "Placement rules of a file and of lines, read and not yet applied.")
      .def(nb::init<const std::string&, const std::vector<std::string>&, const std::string&>(),
           nb::arg("path"), nb::arg("place"), nb::arg("devices"),
           "An empty path: `place` alone. devices: \"cuda=cpu,xpu:0=cuda:0\", or empty.")
      .def("operators", &Rules::operators,
           "(what it puts there as written, whether KT knows that operator) of each rule.")
      .def("set_own", &Rules::set_own, nb::arg("rules"),
           "Rules, by index, whose operators are the caller's: their arguments are not looked at.")
      .def("kwargs", &Rules::kwargs, nb::arg("rule"), "JSON: arguments with devices renamed.")
      .def("where", &Rules::where, nb::arg("rule"), "\"FILE:26: rule 4\"")
      .def("recursive", &Rules::recursive, nb::arg("rule"))
      .def("place", &Rules::place, nb::arg("request"),
           "What the rules decide of a tree. Both are JSON: {family, modules: [{name, classes, experts, "
           "shape, bias, "
           "stored}], weights, on_gpu} and {modules: [{rule, decided, device, formats, stored, operator, "
           "what, op}], "
           "plan, text}.");
}

}  // namespace kt::python
