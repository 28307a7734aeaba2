// Pickles that torch.save writes around tensors, read as data: nothing is imported, called or built. A call that
// the pickle asks for is a value like any other, and what it calls has to stand in a short list.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline weights {

// Others are found by their place among the pickle's values.
struct PickleValue {
  enum class Kind : uint8_t {
    kNone,
    kBool,
    kInteger,
    kFloat,
    kText,
    kTuple,
    kList,
    kDict,    // items: key, value, key, value ...
    kGlobal,  // text: "torch\nIntStorage", module and name as they stand in the file
    kCall,    // items: what is called, then its arguments
    kStored,  // items: what torch says of a storage that lies in another entry
  };
  Kind kind = Kind::kNone;
  int64_t integer = 0;
  double number = 0;
  std::string_view text;
  std::vector<uint32_t> items;
};

struct Pickle {
  std::vector<PickleValue> values;
  uint32_t root = 0;
  const PickleValue& at(uint32_t value) const { return values[value]; }
  const PickleValue& top() const { return values[root]; }
};

// Protocol 2, which torch.save writes unless it is told otherwise, and of it what dicts, lists, tuples, numbers,
// texts and tensors need. Error(kInput) naming `name` and what was found: another opcode, another global, an
// integer of more than 64 bits; more than a million values; a pickle that ends early. Texts are views into it.
Pickle parse_pickle(std::span<const std::byte> pickle, std::string_view name);

// "torch.IntStorage" of a global, for messages.
std::string dotted(std::string_view global);

}  // namespace kt::inline weights
