// A text being edited as rows of a terminal, and the fewest bytes that turn what is shown into what should
// be. Knows nothing of keys.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline terminal {

struct ScreenPlace {
  int row = 0, column = 0;
  bool operator==(const ScreenPlace&) const = default;
};

struct LayoutInput {
  std::string_view prompt;       // before the first line
  std::string_view more_prompt;  // before every other line
  std::string_view text;         // valid UTF-8
  size_t cursor = 0;
  int width = 80;
  bool colour = false;  // prompts stand out
};

// Where everything stands: lines are broken at the width wherever that falls, wide characters whole. A tab
// takes four columns.
class TextLayout {
 public:
  struct Row {
    std::string bytes;  // with colours
    int cells = 0;
  };

  explicit TextLayout(const LayoutInput& input);
  const std::vector<Row>& rows() const { return rows_; }  // at least one
  ScreenPlace cursor() const { return cursor_; }
  // The offset in the text that stands in the row, at the column or the nearest before it.
  size_t offset_at(ScreenPlace place) const;

 private:
  struct Spot {
    size_t offset;
    ScreenPlace place;
  };
  void add_prompt(std::string_view prompt);
  void add(std::string_view shown, int cells);
  void next_row();

  int width_;
  bool colour_;
  std::vector<Row> rows_;
  std::vector<Spot> spots_;  // of every visible character and of the end, rising
  ScreenPlace cursor_;
};

// What the terminal shows of it, the cursor's row included. If there are more rows than the terminal has, it
// is those around the cursor.
class LineScreen {
 public:
  // Bytes that make the terminal show the layout. The first call starts in the cursor's row, which has to be
  // empty.
  std::string show(const TextLayout& layout, int height);
  // Bytes that put the cursor below what is shown and forget it.
  std::string leave();
  // Bytes that erase what is shown, after the terminal got another width and broke its rows again.
  std::string erase_after_resize(int width);
  // Bytes that clear the whole screen.
  std::string clear();
  // Nothing is shown; the cursor's row is empty.
  void forget();

 private:
  std::vector<TextLayout::Row> shown_;
  ScreenPlace cursor_;  // within shown_
  int top_ = 0;         // row of the layout that is the first shown
};

}  // namespace kt::inline terminal
