// Line editing as a state machine: bytes of a terminal in, bytes for the terminal and events out. No files,
// no signals, no system calls: terminal/terminal.h has those.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terminal/edit_buffer.h"
#include "terminal/keys.h"
#include "terminal/line_screen.h"

namespace kt::inline terminal {

enum class EditEvent {
  kNone,       // everything was eaten, more is wanted
  kSubmit,     // Enter: text() is the message
  kEnd,        // Ctrl-D in an empty text
  kInterrupt,  // Ctrl-C: text() is what stood there
  kSuspend,    // Ctrl-Z
};

struct EditorOptions {
  std::string prompt = "> ", more_prompt = ". ";
  bool colour = false;
  // Texts that what stands before the cursor could become.
  std::function<std::vector<std::string>(std::string_view before)> complete = {};
  // Enter does not submit this text but opens another line: returns the text to go on with, or nothing.
  std::function<std::optional<std::string>(const std::string& text)> go_on = {};
};

class LineEditor {
 public:
  // The history, oldest first, is read while a text is edited and must outlive that.
  LineEditor(EditorOptions options, const std::vector<std::string>& history);

  // Starts an empty text in the terminal's current row, which has to be empty.
  void begin(int width, int height);
  // Up to the first event; what comes behind it is kept for the next begin(), and feed("") goes on with it.
  EditEvent feed(std::string_view bytes);
  // An ESC, or a Ctrl-C in a paste, waits for what may follow it. Call settle() when nothing came for some 50 ms.
  bool undecided() const { return keys_.undecided(); }
  EditEvent settle();
  void resize(int width, int height);
  // After the terminal was used by somebody else: draws everything again in an empty row.
  void redraw();

  const std::string& text() const { return buffer_.text(); }
  size_t cursor() const { return buffer_.cursor(); }
  bool searching() const { return search_.active; }
  // Bytes for the terminal since the last call.
  std::string take_output() { return std::exchange(output_, {}); }

 private:
  struct Search {
    bool active = false, found = true;
    std::string query, draft;
    size_t draft_cursor = 0, at = 0;  // at: index in the history of the match; its size: none yet
  };

  EditEvent take(const Key& key);
  EditEvent take_control(char letter);
  EditEvent enter();
  void take_alt(char letter);
  void move_vertically(int rows);
  void walk_history(int step);
  void complete();
  void list(const std::vector<std::string>& candidates);

  bool search_key(const Key& key);  // false: the search is over, the key is for the text
  void find(size_t before);
  void end_search(bool keep);

  TextLayout layout() const;
  void refresh();
  EditEvent leave(EditEvent event);

  EditorOptions options_;
  int width_ = 80, height_ = 24;
  const std::vector<std::string>& history_;
  KeyDecoder keys_;
  EditBuffer buffer_;
  LineScreen screen_;
  Search search_;
  size_t history_at_ = 0;  // history_.size(): the draft
  std::string draft_;
  int wanted_column_ = -1;  // of moves up and down in a row
  std::string output_;
};

}  // namespace kt::inline terminal
