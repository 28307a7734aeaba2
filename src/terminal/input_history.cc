#include "terminal/input_history.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/utf8.h"

namespace kt::inline terminal {
namespace {

std::vector<std::string> lines_of(std::string_view bytes) {
  std::vector<std::string> lines;
  while (!bytes.empty()) {
    const size_t end = std::min(bytes.find('\n'), bytes.size());
    if (end > 0) lines.emplace_back(bytes.substr(0, end));
    bytes.remove_prefix(std::min(end + 1, bytes.size()));
  }
  return lines;
}

template <typename T>
void keep_last(std::vector<T>& list, size_t most) {
  if (list.size() > most) list.erase(list.begin(), list.end() - static_cast<ptrdiff_t>(most));
}

// The file, open for adding and locked. Whoever shortens it puts another in its place; then the lock is on a
// file that has no name any more, and the new one is opened.
class LockedFile {
 public:
  explicit LockedFile(const std::string& path) {
    while (true) {
      fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_CLOEXEC, 0600);
      if (fd_ < 0) fail("{}: {}", path, std::strerror(errno));
      while (::flock(fd_, LOCK_EX) != 0 && errno == EINTR) {
      }
      struct stat held = {}, named = {};
      if (::fstat(fd_, &held) == 0 && ::stat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino &&
          held.st_dev == named.st_dev)
        return;
      ::close(fd_);
    }
  }
  ~LockedFile() { ::close(fd_); }
  LockedFile(const LockedFile&) = delete;
  LockedFile& operator=(const LockedFile&) = delete;

  void append(const std::string& bytes, const std::string& path) const {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written != static_cast<ssize_t>(bytes.size()))
      fail("{}: {} of {} bytes were written: {}", path, std::max<ssize_t>(written, 0), bytes.size(),
           written < 0 ? std::strerror(errno) : "the disk is full");
  }

 private:
  int fd_ = -1;
};

}  // namespace

std::string escape_entry(std::string_view entry) {
  std::string out;
  for (const char c : entry) {
    if (c == '\n')
      out += "\\n";
    else if (c == '\\')
      out += "\\\\";
    else
      out += c;
  }
  return out;
}

std::string unescape_entry(std::string_view line) {
  std::string out;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '\\' && i + 1 < line.size()) {
      ++i;
      out += line[i] == 'n' ? '\n' : line[i];
    } else {
      out += line[i];
    }
  }
  return out;
}

InputHistory::InputHistory(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  for (const std::string& line : lines_of(read_small_file(path_).value_or("")))
    entries_.push_back(replace_invalid_utf8(unescape_entry(line)));
  keep_last(entries_, kMostEntries);
}

void InputHistory::add(const std::string& entry) {
  if (entry.find_first_not_of(" \n\t") == std::string::npos) return;
  if (!entries_.empty() && entries_.back() == entry) return;
  entries_.push_back(entry);
  keep_last(entries_, kMostEntries);
  if (!path_.empty() && entry.size() <= kMostBytes) append_to_file(entry);
}

void InputHistory::append_to_file(const std::string& entry) const {
  std::error_code ignored;  // opening the file says what is wrong
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), ignored);
  const LockedFile file(path_);
  file.append(escape_entry(entry) + "\n", path_);
  std::vector<std::string> lines = lines_of(read_small_file(path_).value_or(""));
  if (lines.size() <= kMostEntries) return;
  keep_last(lines, kMostEntries);
  std::string kept;
  for (const std::string& line : lines) kept += line + "\n";
  write_atomically(path_, kept);  // with the permissions of the old one
}

}  // namespace kt::inline terminal
