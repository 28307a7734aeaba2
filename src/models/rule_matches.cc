#include "models/rule_matches.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/utf8.h"
#include "text/shown.h"

namespace kt::inline models {
namespace {

// Of all patterns on all names; what people write takes a few million.
constexpr size_t kMostSteps = 1'000'000'000;

class RuleWalk {
 public:
  RuleWalk(const RuleFile& file, const ModuleTree& tree) : file_(file), tree_(tree) {
    for (const Rule& rule : file.rules) {
      out_.uses.push_back(operator_use(file, rule));
      classes_.push_back(rule.match_class.empty() ? MatchedClass{.state = MatchedClass::State::kAny}
                                                  : matched_class(rule.match_class, tree.family));
      spelling_.push_back(rule.name ? spelling_number(tree.spelling_of(rule.name->pattern())) : 0);
    }
  }

  RuleMatches walk() {
    const std::vector<ModelModule>& modules = tree_.modules;
    out_.rule.assign(modules.size(), RuleMatches::kNone);
    for (size_t i = 0; i < modules.size();) {
      open(modules[i]);
      for (size_t r = 0; r < file_.rules.size() && out_.rule[i] == RuleMatches::kNone; ++r)
        if (matches(r)) out_.rule[i] = static_cast<int>(r);
      const int rule = out_.rule[i];
      const size_t next =
          rule >= 0 && !file_.rules[static_cast<size_t>(rule)].recursive ? modules[i].end : i + 1;
      while (++i < next) out_.rule[i] = RuleMatches::kBelow;
    }
    find_idle();
    if (out_.idle.size() == file_.rules.size())
      fail("{}: none of {} rules matches a module of this model, {}; {} {}", file_.name, file_.rules.size(),
           tree_.family, file_.rules[0].label(), out_.idle[0].why);
    note_root();
    return std::move(out_);
  }

 private:
  size_t spelling_number(ModuleSpelling spelling) {
    const auto found = std::ranges::find(spellings_, spelling);
    const auto at = static_cast<size_t>(found - spellings_.begin());
    if (found == spellings_.end()) spellings_.push_back(std::move(spelling));
    return at;
  }

  // The module that is looked at, in the spellings that rules ask for.
  void open(const ModelModule& module) {
    module_ = &module;
    names_.assign(spellings_.size(), {});
    names_[0] = module.name;
  }

  bool matches(size_t r) {
    const Rule& rule = file_.rules[r];
    if (!is_of_class(r, *module_)) return false;
    if (!rule.name) return true;
    std::string& name = names_[spelling_[r]];
    if (name.empty()) name = spelled(*module_, spellings_[spelling_[r]]);
    try {
      RegexSearch search(*rule.name, name, std::min(kMostNameSteps, kMostSteps - steps_));
      const bool found = search.next().has_value();
      steps_ += search.steps();
      return found;
    } catch (const Error&) {
      const bool all = kMostSteps - steps_ < kMostNameSteps;
      fail("{}: match: name: pattern \"{}\" takes more than {} steps {} \"{}\"",
           file_.place(rule, rule.lines.of("match").of("name").line), shown(rule.name->pattern()),
           all ? kMostSteps : kMostNameSteps, all ? "with all before it, by module" : "on module",
           module_->name);
    }
  }

  bool is_of_class(size_t r, const ModelModule& module) const {
    return classes_[r].matches(module.kind) ||
           (!module.classes.empty() &&
            std::ranges::find(module.classes, last_word(file_.rules[r].match_class)) != module.classes.end());
  }

  void find_idle() {
    std::set<int> busy(out_.rule.begin(), out_.rule.end());
    for (size_t r = 0; r < file_.rules.size(); ++r)
      if (!busy.contains(static_cast<int>(r)))
        out_.idle.push_back({.rule = static_cast<int>(r), .why = why_idle(r)});
  }

  std::string why_idle(size_t r) {
    const MatchedClass& wanted = classes_[r];
    const std::string word(last_word(file_.rules[r].match_class));
    const bool has =
        std::ranges::any_of(tree_.modules, [&](const ModelModule& module) { return is_of_class(r, module); });
    if (wanted.state == MatchedClass::State::kUnknown && !has)
      return text("no class \"{}\" is known; the nearest is {}", shown(word), wanted.nearest);
    if (wanted.state == MatchedClass::State::kElsewhere && !has)
      return text("this model, {}, has no class {}", tree_.family, word);
    std::set<int> took, above;
    int last = RuleMatches::kNone;  // the rule of the last module that was looked at
    for (size_t i = 0; i < tree_.modules.size(); ++i) {
      const bool below = out_.rule[i] == RuleMatches::kBelow;
      if (!below) last = out_.rule[i];
      if (!is_of_class(r, tree_.modules[i])) continue;
      open(tree_.modules[i]);
      if (matches(r)) (below ? above : took).insert(last);
    }
    if (!took.empty() && !above.empty())
      return text("names only what {} took, and what is below {}, not recursive", file_.labels(took),
                  file_.labels(above));
    if (!took.empty()) return text("names only what {} took", file_.labels(took));
    if (!above.empty()) return text("names only what is below {}, not recursive", file_.labels(above));
    if (!has) return text("no module of this model is a {}", word);
    if (wanted.state == MatchedClass::State::kHere && wanted.matches(ModuleKind::kRotary))
      return "matches no module: layers have no rotary module of their own";
    return "matches no module";
  }

  void note_root() {
    const int root = out_.rule[0];
    if (root < 0 || file_.rules[static_cast<size_t>(root)].recursive) return;
    const Rule& rule = file_.rules[static_cast<size_t>(root)];
    out_.notes.push_back(
        text("{}: matches the whole model and is not recursive: nothing is placed", file_.place(rule)));
  }

  const RuleFile& file_;
  const ModuleTree& tree_;
  RuleMatches out_;
  std::vector<MatchedClass> classes_;                           // of each rule
  std::vector<size_t> spelling_;                                // of each rule: an index
  std::vector<ModuleSpelling> spellings_ = {ModuleSpelling{}};  // each once; the tree's own first
  const ModelModule* module_ = nullptr;
  std::vector<std::string> names_;  // of the module, in each spelling; empty: not made yet
  size_t steps_ = 0;
};

}  // namespace

RuleMatches match_rules(const RuleFile& file, const ModuleTree& tree) { return RuleWalk(file, tree).walk(); }

}  // namespace kt::inline models
