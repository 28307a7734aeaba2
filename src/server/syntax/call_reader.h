// One tool call as it comes, byte by byte, behind the marker that begins it. What the bytes mean is the business of one
// reader for each form of calls.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "server/syntax/call_syntax.h"

namespace kt::inline server {

class CallReader {
 public:
  virtual ~CallReader() = default;

  enum class Step {
    kMore,
    kDone,  // this byte is the last of the call
    kBad,   // this byte cannot be part of the call
  };
  Step push(char c) {
    ++pushed_;
    return read(c);
  }

  // Once, when the call is certain: its name.
  std::optional<std::string> take_name() {
    if (!certain_ || named_) return std::nullopt;
    named_ = true;
    return name_;
  }
  const std::string& id() const { return id_; }  // empty: the syntax has none
  // Arguments since the last time; empty before the call is certain.
  std::string take_arguments() { return certain_ ? std::exchange(arguments_, {}) : std::string(); }
  // The name is known and the arguments have begun: the call cannot be taken back.
  bool certain() const { return certain_; }
  // Of the bytes that were pushed, those whose meaning name and arguments tell in full. What comes after must be kept
  // in case it is no part of the call.
  size_t told() const { return told_; }
  // The call is an item of a list: behind it comes another, or the list's end.
  bool listed() const { return listed_; }
  // Nothing is missing but the marker that ends the call.
  virtual bool complete() const = 0;
  // The answer ends here, before the call did: what was held back of a value becomes part of the arguments, and where
  // nothing but the call's end is missing it is complete(), if the answer was not cut.
  virtual void end(AnswerEnd) {}

 protected:
  virtual Step read(char c) = 0;

  std::string name_, id_, arguments_;
  bool certain_ = false, listed_ = false;
  size_t pushed_ = 0, told_ = 0;

 private:
  bool named_ = false;
};

// Behind call_begin. `types` may be null: then every argument may have any type.
std::unique_ptr<CallReader> make_call_reader(ToolSyntax syntax, std::shared_ptr<const ArgumentTypes> types);
// Behind the comma of a list whose items are calls.
std::unique_ptr<CallReader> make_item_reader(ToolSyntax syntax);

constexpr size_t kLongestCallName = 512;  // of keys and ids, too
// Whether the text can be a function's name as a model writes it.
bool is_call_name(std::string_view name);
std::string trimmed(std::string_view text);

}  // namespace kt::inline server
