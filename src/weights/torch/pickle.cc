#include "weights/torch/pickle.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_map>

#include "base/error.h"
#include "base/utf8.h"
#include "text/shown.h"
#include "weights/torch/torch_refusal.h"

namespace kt::inline weights {
namespace {

using Kind = PickleValue::Kind;

constexpr size_t kMostValues = 1 << 20, kMostStack = 1 << 20;
constexpr uint8_t kProtocol = 2;

// What a file of tensors may name. Storages and dtypes are only compared with, never called.
constexpr std::string_view kGlobals[] = {
    "collections\nOrderedDict",
    "torch\nSize",
    "torch._utils\n_rebuild_tensor_v2",
    "torch._utils\n_rebuild_tensor_v3",
    "torch._utils\n_rebuild_parameter",
    "torch.storage\nUntypedStorage",
    "torch\nFloatStorage",
    "torch\nDoubleStorage",
    "torch\nHalfStorage",
    "torch\nBFloat16Storage",
    "torch\nByteStorage",
    "torch\nCharStorage",
    "torch\nShortStorage",
    "torch\nIntStorage",
    "torch\nLongStorage",
    "torch\nBoolStorage",
    "torch\nuint16",
    "torch\nuint32",
    "torch\nuint64",
};

// Opcodes by the names that Python's pickletools gives them.
enum Opcode : uint8_t {
  kMark = '(',
  kStop = '.',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersId = 'Q',
  kReduce = 'R',
  kBinUnicode = 'X',
  kBinFloat = 'G',
  kEmptyList = ']',
  kEmptyTuple = ')',
  kEmptyDict = '}',
  kAppend = 'a',
  kAppends = 'e',
  kGlobal = 'c',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kSetItems = 'u',
  kTuple = 't',
  kProto = 0x80,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
};

class PickleReader {
 public:
  PickleReader(std::span<const std::byte> pickle, std::string_view name) : pickle_(pickle), name_(name) {}

  Pickle read() {
    if (take<uint8_t>() != kProto) fail("{}: no pickle at the beginning of data.pkl", name_);
    if (const int protocol = take<uint8_t>(); protocol != kProtocol)
      refuse_torch_file(name_, text("a pickle of protocol {}, {} is read here", protocol, int{kProtocol}));
    for (uint8_t code = take<uint8_t>(); code != kStop; code = take<uint8_t>())
      if (!number(code) && !container(code) && !memo(code)) unknown(code);
    if (at_ != pickle_.size()) damaged("more bytes behind its end");
    out_.root = pop();
    if (!stack_.empty() || !marks_.empty()) damaged("values left over at its end");
    return std::move(out_);
  }

 private:
  // Handled here: constants, numbers, texts and names.
  bool number(uint8_t code) {
    switch (code) {
      case kNone:
        return push({.kind = Kind::kNone});
      case kNewTrue:
      case kNewFalse:
        return push({.kind = Kind::kBool, .integer = code == kNewTrue});
      case kBinInt:
        return push({.kind = Kind::kInteger, .integer = take<int32_t>()});
      case kBinInt1:
        return push({.kind = Kind::kInteger, .integer = take<uint8_t>()});
      case kBinInt2:
        return push({.kind = Kind::kInteger, .integer = take<uint16_t>()});
      case kLong1:
        return push({.kind = Kind::kInteger, .integer = long_integer()});
      case kBinFloat:
        return push({.kind = Kind::kFloat, .number = big_endian_double()});
      case kBinUnicode: {
        const std::string_view text = characters(take<uint32_t>());
        if (!is_valid_utf8(text)) damaged("a text that is no UTF-8");
        return push({.kind = Kind::kText, .text = text});
      }
      case kGlobal:
        return push({.kind = Kind::kGlobal, .text = global()});
      default:
        return false;
    }
  }

  // Handled here: what is made of values that came before.
  bool container(uint8_t code) {
    switch (code) {
      case kMark:
        if (marks_.size() >= kMostStack) damaged("too many marks");
        marks_.push_back(stack_.size());
        return true;
      case kEmptyTuple:
        return push({.kind = Kind::kTuple});
      case kEmptyList:
        return push({.kind = Kind::kList});
      case kEmptyDict:
        return push({.kind = Kind::kDict});
      case kTuple:
        return push({.kind = Kind::kTuple, .items = pop_to_mark()});
      case kTuple1:
      case kTuple2:
      case kTuple3:
        return push({.kind = Kind::kTuple, .items = pop_last(code - kTuple1 + 1u)});
      case kAppend:
        return add_to(Kind::kList, pop_last(1));
      case kAppends:
        return add_to(Kind::kList, pop_to_mark());
      case kSetItem:
        return add_to(Kind::kDict, pop_last(2));
      case kSetItems:
        return add_to(Kind::kDict, pop_to_mark());
      case kReduce:
        return push(call());
      case kBinPersId:
        return push({.kind = Kind::kStored, .items = {pop()}});
      default:
        return false;
    }
  }

  bool memo(uint8_t code) {
    switch (code) {
      case kBinPut:
        return keep(take<uint8_t>());
      case kLongBinPut:
        return keep(take<uint32_t>());
      case kBinGet:
        return recall(take<uint8_t>());
      case kLongBinGet:
        return recall(take<uint32_t>());
      default:
        return false;
    }
  }

  // What calls are for is said by whoever reads tensors; that OrderedDict() is a dict, and that torch.Size(t) is t,
  // is said here.
  PickleValue call() {
    const std::vector<uint32_t> both = pop_last(2);
    const PickleValue &called = out_.at(both[0]), &arguments = out_.at(both[1]);
    if (called.kind != Kind::kGlobal || arguments.kind != Kind::kTuple)
      damaged("a call of what is no function");
    if (called.text == "collections\nOrderedDict") {
      if (!arguments.items.empty())
        refuse_torch_file(name_, "it holds collections.OrderedDict with arguments");
      return {.kind = Kind::kDict};
    }
    if (called.text == "torch\nSize") {
      if (arguments.items.size() != 1 || out_.at(arguments.items[0]).kind != Kind::kTuple)
        damaged("a torch.Size of what is no tuple");
      return {.kind = Kind::kTuple, .items = out_.at(arguments.items[0]).items};
    }
    PickleValue out{.kind = Kind::kCall, .items = {both[0]}};
    out.items.insert(out.items.end(), arguments.items.begin(), arguments.items.end());
    return out;
  }

  std::string_view global() {
    const std::string_view rest = characters_left();
    const size_t module = rest.find('\n'), end = module == rest.npos ? module : rest.find('\n', module + 1);
    if (end == rest.npos) damaged("a name that does not end");
    const std::string_view found = characters(end + 1).substr(0, end);
    if (std::ranges::find(kGlobals, found) == std::end(kGlobals))
      refuse_torch_file(name_, text("it holds {}", shown(dotted(found))));
    return found;
  }

  int64_t long_integer() {
    const size_t bytes = take<uint8_t>();
    if (bytes > sizeof(int64_t)) refuse_torch_file(name_, text("it holds an integer of {} bytes", bytes));
    const std::string_view digits = characters(bytes);
    uint64_t out = 0;
    for (size_t i = 0; i < bytes; ++i) out |= uint64_t{static_cast<uint8_t>(digits[i])} << (8 * i);
    const bool negative = bytes > 0 && (static_cast<uint8_t>(digits[bytes - 1]) & 0x80);
    if (negative && bytes < sizeof(int64_t)) out |= ~uint64_t{0} << (8 * bytes);
    return static_cast<int64_t>(out);
  }

  double big_endian_double() {
    uint64_t bits = 0;
    for (const char c : characters(sizeof(double))) bits = bits << 8 | static_cast<uint8_t>(c);
    return std::bit_cast<double>(bits);
  }

  template <typename T>
  T take() {
    T out;
    const std::string_view bytes = characters(sizeof(T));
    std::memcpy(&out, bytes.data(), bytes.size());
    return out;
  }
  std::string_view characters_left() const {
    return {reinterpret_cast<const char*>(pickle_.data()) + at_, pickle_.size() - at_};
  }
  std::string_view characters(size_t count) {
    const std::string_view rest = characters_left();
    if (rest.size() < count) damaged("it ends early");
    at_ += count;
    return rest.substr(0, count);
  }

  bool push(PickleValue value) {
    if (out_.values.size() >= kMostValues) damaged(text("more than {} values", kMostValues));
    items_ += value.items.size();
    if (items_ > kMostValues) damaged(text("more than {} values", kMostValues));
    stack_.push_back(static_cast<uint32_t>(out_.values.size()));
    out_.values.push_back(std::move(value));
    return true;
  }
  uint32_t pop() { return pop_last(1).front(); }
  std::vector<uint32_t> pop_last(size_t count) {
    const size_t floor = marks_.empty() ? 0 : marks_.back();
    if (stack_.size() < floor + count) damaged("a value is missing");
    std::vector<uint32_t> out(stack_.end() - static_cast<ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return out;
  }
  std::vector<uint32_t> pop_to_mark() {
    if (marks_.empty()) damaged("a mark is missing");
    const size_t mark = marks_.back();
    std::vector<uint32_t> out = pop_last(stack_.size() - mark);
    marks_.pop_back();
    return out;
  }
  bool add_to(Kind kind, const std::vector<uint32_t>& items) {
    const size_t floor = marks_.empty() ? 0 : marks_.back();
    if (stack_.size() <= floor || out_.at(stack_.back()).kind != kind)
      damaged("items without a list or dict");
    if (kind == Kind::kDict && items.size() % 2 != 0) damaged("a key without a value");
    items_ += items.size();
    if (items_ > kMostValues) damaged(text("more than {} values", kMostValues));
    std::vector<uint32_t>& to = out_.values[stack_.back()].items;
    to.insert(to.end(), items.begin(), items.end());
    return true;
  }
  bool keep(uint32_t slot) {
    if (stack_.empty()) damaged("nothing to remember");
    if (memo_.size() >= kMostValues) damaged(text("more than {} values", kMostValues));
    memo_[slot] = stack_.back();
    return true;
  }
  bool recall(uint32_t slot) {
    const auto found = memo_.find(slot);
    if (found == memo_.end()) damaged(text("value {} was not remembered", slot));
    if (stack_.size() >= kMostStack) damaged(text("more than {} values", kMostStack));
    stack_.push_back(found->second);
    return true;
  }

  [[noreturn]] void damaged(std::string_view what) const {
    fail("{}: data.pkl, byte {}: {}", name_, at_, what);
  }
  [[noreturn]] void unknown(uint8_t code) const {
    constexpr std::string_view kDigits = "0123456789abcdef";
    refuse_torch_file(name_, text("data.pkl, byte {}: opcode 0x{}{} is none that torch writes for tensors",
                                  at_ - 1, kDigits[code >> 4], kDigits[code & 15]));
  }

  const std::span<const std::byte> pickle_;
  const std::string_view name_;
  size_t at_ = 0;
  size_t items_ = 0;  // of all containers
  Pickle out_;
  std::vector<uint32_t> stack_;
  std::vector<size_t> marks_;  // sizes of the stack
  std::unordered_map<uint32_t, uint32_t> memo_;
};

}  // namespace

Pickle parse_pickle(std::span<const std::byte> pickle, std::string_view name) {
  return PickleReader(pickle, name).read();
}

std::string dotted(std::string_view global) {
  std::string out(global);
  std::ranges::replace(out, '\n', '.');
  return out;
}

}  // namespace kt::inline weights
