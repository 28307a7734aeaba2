// What was typed before, kept in a file between runs.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline terminal {

// One entry a line, '\' and line ends escaped; 0600. Several programs may add to one file at once: nothing is
// lost, and each sees what was there when it began and what it added itself.
class InputHistory {
 public:
  static constexpr size_t kMostEntries = 1000;
  static constexpr size_t kMostBytes = 64u << 10;  // of an entry in the file; longer ones stay in memory

  explicit InputHistory(std::string path);  // "": memory only. A file that cannot be read counts as empty

  const std::vector<std::string>& entries() const { return entries_; }  // oldest first
  // Not if it is empty or repeats the last. Error(kInput) if the file cannot be written; the entry is in
  // memory then.
  void add(const std::string& entry);

 private:
  void append_to_file(const std::string& entry) const;

  std::string path_;
  std::vector<std::string> entries_;
};

std::string escape_entry(std::string_view entry);   // on one line
std::string unescape_entry(std::string_view line);  // the way back

}  // namespace kt::inline terminal
