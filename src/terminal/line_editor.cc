#include "terminal/line_editor.h"

#include <algorithm>

#include "base/text.h"
#include "terminal/terminal_text.h"

namespace kt::inline terminal {
namespace {

// What all of them begin with, whole characters only.
std::string common_beginning(const std::vector<std::string>& words) {
  std::string common = words.front();
  for (const std::string& word : words) {
    const auto [end, unused] = std::ranges::mismatch(common, word);
    common.resize(static_cast<size_t>(end - common.begin()));
  }
  while (!is_valid_utf8(common)) common.pop_back();
  return common;
}

bool is_cut(const Key& key) {
  if (key.code == KeyCode::kAltBackspace) return true;
  if (key.code == KeyCode::kAlt) return key.letter == 'd';
  return key.code == KeyCode::kControl && (key.letter == 'K' || key.letter == 'U' || key.letter == 'W');
}

bool is_vertical(const Key& key) {
  return key.code == KeyCode::kUp || key.code == KeyCode::kDown ||
         (key.code == KeyCode::kControl && (key.letter == 'P' || key.letter == 'N'));
}

}  // namespace

LineEditor::LineEditor(EditorOptions options, const std::vector<std::string>& history)
    : options_(std::move(options)), history_(history) {}

void LineEditor::begin(int width, int height) {
  width_ = width;
  height_ = height;
  buffer_.set("");
  buffer_.end_cuts();
  search_ = {};
  draft_.clear();
  history_at_ = history_.size();
  wanted_column_ = -1;
  screen_.forget();
  refresh();
}

EditEvent LineEditor::feed(std::string_view bytes) {
  keys_.push(bytes);
  while (const std::optional<Key> key = keys_.next()) {
    const EditEvent event = take(*key);
    if (event != EditEvent::kNone) return event;
  }
  refresh();  // once for all keys: a paste without brackets would else draw for every character
  return EditEvent::kNone;
}

EditEvent LineEditor::settle() {
  if (!undecided()) return EditEvent::kNone;
  const EditEvent event = take(keys_.settle());
  if (event == EditEvent::kNone) refresh();
  return event;
}

EditEvent LineEditor::take(const Key& key) {
  if (search_.active && search_key(key)) return EditEvent::kNone;
  if (!is_cut(key)) buffer_.end_cuts();
  if (!is_vertical(key)) wanted_column_ = -1;
  switch (key.code) {
    case KeyCode::kText:
    case KeyCode::kPaste:
      return buffer_.insert(key.text), EditEvent::kNone;
    case KeyCode::kControl:
      return take_control(key.letter);
    case KeyCode::kAlt:
      return take_alt(key.letter), EditEvent::kNone;
    case KeyCode::kEnter:
      return enter();
    case KeyCode::kAltEnter:
      return buffer_.insert("\n"), EditEvent::kNone;
    case KeyCode::kTab:
      return complete(), EditEvent::kNone;
    case KeyCode::kBackspace:
      return buffer_.backspace(), EditEvent::kNone;
    case KeyCode::kAltBackspace:
      return buffer_.cut_word_left(), EditEvent::kNone;
    case KeyCode::kDelete:
      return buffer_.erase(), EditEvent::kNone;
    case KeyCode::kUp:
      return move_vertically(-1), EditEvent::kNone;
    case KeyCode::kDown:
      return move_vertically(1), EditEvent::kNone;
    case KeyCode::kLeft:
      return buffer_.left(), EditEvent::kNone;
    case KeyCode::kRight:
      return buffer_.right(), EditEvent::kNone;
    case KeyCode::kWordLeft:
      return buffer_.word_left(), EditEvent::kNone;
    case KeyCode::kWordRight:
      return buffer_.word_right(), EditEvent::kNone;
    case KeyCode::kHome:
      return buffer_.line_start(), EditEvent::kNone;
    case KeyCode::kEnd:
      return buffer_.line_end(), EditEvent::kNone;
    case KeyCode::kEscape:
    case KeyCode::kUnknown:
      break;
  }
  return EditEvent::kNone;
}

EditEvent LineEditor::take_control(char letter) {
  switch (letter) {
    case 'A':
      return buffer_.line_start(), EditEvent::kNone;
    case 'B':
      return buffer_.left(), EditEvent::kNone;
    case 'C':
      return leave(EditEvent::kInterrupt);
    case 'D':
      if (buffer_.empty()) return leave(EditEvent::kEnd);
      return buffer_.erase(), EditEvent::kNone;
    case 'E':
      return buffer_.line_end(), EditEvent::kNone;
    case 'F':
      return buffer_.right(), EditEvent::kNone;
    case 'K':
      return buffer_.cut_to_line_end(), EditEvent::kNone;
    case 'L':
      return output_ += screen_.clear(), EditEvent::kNone;
    case 'N':
      return move_vertically(1), EditEvent::kNone;
    case 'P':
      return move_vertically(-1), EditEvent::kNone;
    case 'R':
      search_ = {
          .active = true, .draft = buffer_.text(), .draft_cursor = buffer_.cursor(), .at = history_.size()};
      return EditEvent::kNone;
    case 'T':
      return buffer_.transpose(), EditEvent::kNone;
    case 'U':
      return buffer_.cut_to_line_start(), EditEvent::kNone;
    case 'W':
      return buffer_.cut_space_word_left(), EditEvent::kNone;
    case 'Y':
      return buffer_.yank(), EditEvent::kNone;
    case 'Z':
      return refresh(), output_ += screen_.leave(), EditEvent::kSuspend;
    default:
      return EditEvent::kNone;
  }
}

void LineEditor::take_alt(char letter) {
  if (letter == 'b') buffer_.word_left();
  if (letter == 'f') buffer_.word_right();
  if (letter == 'd') buffer_.cut_word_right();
}

EditEvent LineEditor::enter() {
  if (options_.go_on) {
    if (std::optional<std::string> more = options_.go_on(buffer_.text())) {
      buffer_.set(std::move(*more));
      return EditEvent::kNone;
    }
  }
  return leave(EditEvent::kSubmit);
}

EditEvent LineEditor::leave(EditEvent event) {
  refresh();
  output_ += screen_.leave();
  return event;
}

// Through the rows of the text; past its first and last through the history.
void LineEditor::move_vertically(int rows) {
  const TextLayout now = layout();
  const ScreenPlace at = now.cursor();
  if (wanted_column_ < 0) wanted_column_ = at.column;
  const ScreenPlace target{at.row + rows, wanted_column_};
  const bool inside = target.row >= 0 && target.row < static_cast<int>(now.rows().size());
  if (!inside) return walk_history(rows);
  const size_t offset = now.offset_at(target);
  // A row that is only prompt, or a row that the end of a full one opened.
  if (offset == buffer_.cursor()) return walk_history(rows);
  buffer_.move_to(offset);
}

void LineEditor::walk_history(int step) {
  wanted_column_ = -1;
  if (step < 0 ? history_at_ == 0 : history_at_ >= history_.size()) return;
  if (history_at_ == history_.size()) draft_ = buffer_.text();
  history_at_ += static_cast<size_t>(step);
  buffer_.set(history_at_ == history_.size() ? draft_ : history_[history_at_]);
}

void LineEditor::complete() {
  if (!options_.complete) return;
  const std::string before = buffer_.text().substr(0, buffer_.cursor());
  const std::vector<std::string> candidates = options_.complete(before);
  if (candidates.empty()) return;
  const std::string common = common_beginning(candidates);
  const bool only = candidates.size() == 1;
  if (common.size() > before.size() || only)
    return buffer_.replace_before_cursor(only ? common + " " : common);
  list(candidates);
}

void LineEditor::list(const std::vector<std::string>& candidates) {
  refresh();
  output_ += screen_.leave();
  int column = 0;
  for (const std::string& candidate : candidates) {
    const int cells = text_width(candidate);
    const bool fits = column == 0 || column + 2 + cells <= width_;
    if (column > 0) output_ += fits ? "  " : "\r\n";
    output_ += candidate;
    column = fits && column > 0 ? column + 2 + cells : cells;
  }
  output_ += "\r\n";
}

bool LineEditor::search_key(const Key& key) {
  const bool control = key.code == KeyCode::kControl;
  if (key.code == KeyCode::kText) {
    search_.query += key.text;
    find(std::min(search_.at + 1, history_.size()));
  } else if (control && key.letter == 'R') {
    find(search_.at);
  } else if (key.code == KeyCode::kBackspace) {
    if (!search_.query.empty()) search_.query.resize(previous_cluster(search_.query, search_.query.size()));
    find(history_.size());
  } else if (key.code == KeyCode::kEscape || (control && (key.letter == 'G' || key.letter == 'C'))) {
    end_search(false);
  } else {
    end_search(true);
    return false;
  }
  return true;
}

// The youngest entry before this index that has the words.
void LineEditor::find(size_t before) {
  if (search_.query.empty()) return;
  for (size_t i = before; i-- > 0;) {
    const size_t place = history_[i].find(search_.query);
    if (place == std::string::npos) continue;
    search_.at = i;
    search_.found = true;
    return buffer_.set(history_[i], place);
  }
  search_.found = false;
}

void LineEditor::end_search(bool keep) {
  if (!keep) buffer_.set(search_.draft, search_.draft_cursor);
  if (keep && search_.at < history_.size()) {
    if (history_at_ == history_.size()) draft_ = search_.draft;
    history_at_ = search_.at;
  }
  search_.active = false;
}

TextLayout LineEditor::layout() const {
  std::string prompt = options_.prompt;
  if (search_.active)
    prompt = search_.found ? kt::text("(search: {}) ", search_.query)
                           : kt::text("(not found: {}) ", search_.query);
  return TextLayout({.prompt = prompt,
                     .more_prompt = options_.more_prompt,
                     .text = buffer_.text(),
                     .cursor = buffer_.cursor(),
                     .width = width_,
                     .colour = options_.colour});
}

void LineEditor::refresh() { output_ += screen_.show(layout(), height_); }

void LineEditor::resize(int width, int height) {
  if (width == width_ && height == height_) return;
  output_ += screen_.erase_after_resize(width);
  width_ = width;
  height_ = height;
  refresh();
}

void LineEditor::redraw() {
  screen_.forget();
  refresh();
}

}  // namespace kt::inline terminal
