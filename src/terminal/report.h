// Reports for people: aligned tables, colour where a terminal wants it, a status line while something takes
// long.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline terminal {

enum class Ink { kPlain, kGood, kWarning, kBad, kFaint };

// The text in that colour, or as it is when standard output is not a terminal or NO_COLOR is set.
std::string inked(Ink ink, std::string_view string);

// printf's %.*f, and with three significant digits: 0.0123, 1.23, 12.3, 123, 12345.
std::string fixed(double value, int decimals);
std::string three_digits(double value);
std::string percent(double fraction);                   // "87.5%"
std::string counted(int64_t n, std::string_view what);  // "1 core", "2 cores"

// Columns as wide as their widest cell, two spaces apart; the first `left` ones flush left, the others right.
class Table {
 public:
  Table(std::vector<std::string> heads, int left) : left_(left) { add(std::move(heads)); }
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string str() const;  // lines without trailing spaces; cells must not carry colour

 private:
  std::vector<std::vector<std::string>> rows_;
  int left_;
};

// One line on standard error that replaces the last one; nothing at all when that is not a terminal. Cleared
// at the end.
class StatusLine {
 public:
  StatusLine();
  ~StatusLine();
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;
  void show(std::string_view line);

 private:
  bool terminal_;
};

}  // namespace kt::inline terminal
