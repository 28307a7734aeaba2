// The names that placement rules use: classes of modules that rules match, and operators they put there, with their
// arguments. Published names of several programs and ours; a new one is a row. Nothing is imported.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "models/module_tree.h"
#include "models/rules.h"

namespace kt::inline models {

// What match.class says of a model. The last word of a dotted name counts.
struct MatchedClass {
  enum class State : uint8_t {
    kHere,       // `kinds` may be in this model
    kAny,        // every module
    kElsewhere,  // of another family
    kUnknown,    // `nearest` is the known name that is most like it
  };
  State state = State::kUnknown;
  std::vector<ModuleKind> kinds = {};
  std::string nearest = {};

  bool matches(ModuleKind kind) const;
};
MatchedClass matched_class(std::string_view dotted, std::string_view family);

// The word behind the last dot: "KTransformersLinear".
std::string_view last_word(std::string_view dotted);

// What an operator is put in the place of.
enum class Replaces : uint8_t { kAnything, kLinears, kExperts, kAttention, kBlocks, kModels };

// Where and how a rule's operator keeps what it takes, as the rule says. Devices are as RuleFile::device() has them.
struct OperatorUse {
  std::string name;  // the operator's last word
  Replaces what = Replaces::kAnything;
  std::string op = {};      // generate_op, or what the operator takes where the rule is silent
  std::string device = {};  // generate_device: "cpu", "cuda:1"; empty: not said
  std::string format = {};  // a name of kFormats, "stored"; empty: not said
  // Whether a source of few bits is rounded all the same, as flags do.
  bool rounds_again = false;
};
bool is_operator(std::string_view dotted);  // by its last word

// Error(kInput), at the rule's place and with the nearest name: an operator, argument, device, format, operation or
// backend that is not known, an argument of another type, an operation of the CPU on a GPU.
OperatorUse operator_use(const RuleFile& file, const Rule& rule);

}  // namespace kt::inline models
