// What a terminal sends while somebody types, as keys. Bytes come in any pieces; knows nothing of what keys
// do.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace kt::inline terminal {

enum class KeyCode {
  kText,     // a character
  kPaste,    // pasted text, lines and all
  kControl,  // Ctrl with `letter`, 'A' to 'Z'
  kAlt,      // Alt with `letter`, in lower case
  kEnter,
  kAltEnter,
  kTab,
  kEscape,
  kBackspace,
  kAltBackspace,
  kDelete,
  kUp,
  kDown,
  kLeft,
  kRight,
  kWordLeft,
  kWordRight,
  kHome,
  kEnd,
  kUnknown,  // a sequence without a meaning here
};

struct Key {
  KeyCode code = KeyCode::kUnknown;
  char letter = 0;        // of kControl and kAlt
  std::string text = {};  // of kText and kPaste: valid UTF-8, '\n' the only way to end a line
  bool operator==(const Key&) const = default;
};

class KeyDecoder {
 public:
  void push(std::string_view bytes) { bytes_ += bytes; }
  // The next key, if its bytes are all here.
  std::optional<Key> next();
  // An ESC came, and nothing after it: it is the key if nothing follows within some 50 ms. The same with a Ctrl-C
  // inside a paste: if nothing follows, it was typed, and the paste's end will not come.
  bool undecided() const;
  Key settle();  // the undecided bytes as a key

 private:
  std::optional<Key> next_escape();
  std::optional<Key> next_paste();
  Key take(size_t bytes, Key key);

  std::string bytes_;
  bool pasting_ = false;
  std::string paste_;
};

}  // namespace kt::inline terminal
