#include "terminal/keys.h"

#include <algorithm>
#include <array>

#include "base/utf8.h"
#include "terminal/terminal_text.h"

namespace kt::inline terminal {
namespace {

constexpr char kEsc = '\x1b', kCtrlC = '\x03';
constexpr std::string_view kPasteEnd = "\x1b[201~";
constexpr size_t kMostPaste = 4u << 20;  // bytes kept of one paste
constexpr size_t kMostSequence = 32;     // bytes of an escape sequence; what is longer is none

struct Sequence {
  std::string_view bytes;  // after ESC
  KeyCode code;
};
constexpr auto kSequences = std::to_array<Sequence>({
    {"[A", KeyCode::kUp},           {"[B", KeyCode::kDown},         {"[C", KeyCode::kRight},
    {"[D", KeyCode::kLeft},         {"[H", KeyCode::kHome},         {"[F", KeyCode::kEnd},
    {"OA", KeyCode::kUp},           {"OB", KeyCode::kDown},         {"OC", KeyCode::kRight},
    {"OD", KeyCode::kLeft},         {"OH", KeyCode::kHome},         {"OF", KeyCode::kEnd},
    {"[1~", KeyCode::kHome},        {"[7~", KeyCode::kHome},        {"[4~", KeyCode::kEnd},
    {"[8~", KeyCode::kEnd},         {"[3~", KeyCode::kDelete},      {"[1;5C", KeyCode::kWordRight},
    {"[1;5D", KeyCode::kWordLeft},  {"[1;3C", KeyCode::kWordRight}, {"[1;3D", KeyCode::kWordLeft},
    {"[13;2u", KeyCode::kAltEnter}, {"[13;3u", KeyCode::kAltEnter}, {"[27;2;13~", KeyCode::kAltEnter},
});

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Length of the escape sequence at the start, 0 if it is not complete.
size_t sequence_length(std::string_view bytes) {
  if (bytes.size() < 2) return 0;
  if (bytes[1] == 'O') return bytes.size() < 3 ? 0 : 3;
  if (bytes[1] != '[') return 2;
  for (size_t i = 2; i < bytes.size(); ++i) {
    if (bytes[i] >= 0x40 && bytes[i] <= 0x7e) return i + 1;
    if (bytes[i] < 0x20 || bytes[i] == 0x7f) return i;  // cut off: what follows is a key of its own
  }
  return bytes.size() > kMostSequence ? bytes.size() : 0;
}

Key control_key(char c) {
  switch (c) {
    case '\r':
    case '\n':
      return {.code = KeyCode::kEnter};
    case '\t':
      return {.code = KeyCode::kTab};
    case '\b':
    case '\x7f':
      return {.code = KeyCode::kBackspace};
    default:
      break;
  }
  if (c >= 1 && c <= 26) return {.code = KeyCode::kControl, .letter = static_cast<char>('A' + c - 1)};
  return {};
}

// As it may stand in a message: every line end '\n', tabs kept, other control characters left out.
std::string cleaned(std::string_view bytes) {
  std::string lines;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] == '\r' && i + 1 < bytes.size() && bytes[i + 1] == '\n') continue;
    lines += bytes[i] == '\r' ? '\n' : bytes[i];
  }
  return harmless(lines);
}

}  // namespace

Key KeyDecoder::take(size_t bytes, Key key) {
  bytes_.erase(0, bytes);
  return key;
}

std::optional<Key> KeyDecoder::next() {
  if (pasting_) return next_paste();
  if (bytes_.empty()) return std::nullopt;
  const char first = bytes_[0];
  if (first == kEsc) return next_escape();
  if (static_cast<unsigned char>(first) < 0x20 || first == '\x7f') return take(1, control_key(first));
  const Utf8Step step = decode_utf8(bytes_);
  if (step.cut) return std::nullopt;
  const std::string text = cleaned(std::string_view(bytes_).substr(0, step.bytes));
  return take(step.bytes, text.empty() ? Key{} : Key{.code = KeyCode::kText, .text = text});
}

std::optional<Key> KeyDecoder::next_escape() {
  const size_t length = sequence_length(bytes_);
  if (length == 0) return std::nullopt;
  const std::string_view rest = std::string_view(bytes_).substr(1, length - 1);
  if (rest == "[200~") {
    pasting_ = true;
    bytes_.erase(0, length);
    return next_paste();
  }
  for (const Sequence& known : kSequences)
    if (rest == known.bytes) return take(length, {.code = known.code});
  if (length > 2) return take(length, {});
  const char c = bytes_[1];
  if (c == kEsc) return take(1, {.code = KeyCode::kEscape});
  if (c == '\r' || c == '\n') return take(2, {.code = KeyCode::kAltEnter});
  if (c == '\x7f' || c == '\b') return take(2, {.code = KeyCode::kAltBackspace});
  if (is_letter(c)) return take(2, {.code = KeyCode::kAlt, .letter = static_cast<char>(c | 0x20)});
  // ESC, then something typed quickly: the second is a key of its own.
  return take(static_cast<unsigned char>(c) < 0x80 ? 2 : 1, {});
}

std::optional<Key> KeyDecoder::next_paste() {
  const size_t end = bytes_.find(kPasteEnd);
  // Without the end, the last bytes may be its beginning.
  const size_t sure = end != std::string::npos            ? end
                      : bytes_.size() >= kPasteEnd.size() ? bytes_.size() - (kPasteEnd.size() - 1)
                                                          : 0;
  if (paste_.size() < kMostPaste) paste_.append(bytes_, 0, std::min(sure, kMostPaste - paste_.size()));
  bytes_.erase(0, sure);
  if (end == std::string::npos) return std::nullopt;
  pasting_ = false;
  Key key{.code = KeyCode::kPaste, .text = cleaned(paste_)};
  paste_.clear();
  return take(kPasteEnd.size(), std::move(key));
}

bool KeyDecoder::undecided() const {
  if (pasting_) return bytes_.ends_with(kCtrlC);
  return !bytes_.empty() && bytes_[0] == kEsc;
}

Key KeyDecoder::settle() {
  if (pasting_) {
    pasting_ = false;
    bytes_.clear();
    paste_.clear();
    return control_key(kCtrlC);
  }
  const Key key{.code = bytes_.size() == 1 ? KeyCode::kEscape : KeyCode::kUnknown};
  bytes_.clear();
  return key;
}

}  // namespace kt::inline terminal
