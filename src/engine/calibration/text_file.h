// Files of text read in pieces, whatever their size: lines, and documents between separators. UTF-8 only; a
// byte order mark is dropped.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace kt::inline engine {

// Open only while it is read: a dataset may have thousands.
class TextFile {
 public:
  // Errors: missing, unreadable, a folder; UTF-16 and UTF-32, by name.
  explicit TextFile(std::string path);

  // Fewer than into.size() bytes only at the end of the file.
  size_t read_at(uint64_t offset, std::span<char> into) const;
  uint64_t begin() const { return begin_; }  // of the text: behind a byte order mark
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  uint64_t begin_ = 0;
};

struct TextLine {
  uint64_t offset = 0;
  size_t number = 1;  // in the file, from 1
  std::string text = {};
};
inline constexpr size_t kLongestLine = size_t{64} << 20;

// The lines that are not blank, one after the other. A longer one than kLongestLine is an Error with its
// number and size.
class TextLineReader {
 public:
  explicit TextLineReader(const TextFile& file) : TextLineReader(file, file.begin(), 1) {}
  // From the beginning of a line on.
  TextLineReader(const TextFile& file, uint64_t offset, size_t number)
      : file_(&file), next_(offset), number_(number) {}
  bool next(TextLine& line);  // false: there is no more

 private:
  bool refill();

  const TextFile* file_;
  std::string buffer_;
  size_t at_ = 0;  // in the buffer
  uint64_t next_;  // offset of what follows the buffer
  size_t number_;  // of the line that begins at at_
};

struct DocumentPiece {
  std::string text;
  uint64_t offset = 0;
  bool begins = false, ends = false;  // a document, which most pieces are as a whole
};

// The documents of a text: split at the separator, newlines stripped at both ends, empty ones left out. Those
// longer than `piece` come in pieces cut before a line's end, or else before a space. Invalid UTF-8 is an
// Error with its place.
class DocumentReader {
 public:
  static constexpr size_t kPiece = size_t{1} << 20;
  explicit DocumentReader(const TextFile& file, std::string_view separator = "<|endoftext|>",
                          size_t piece = kPiece)
      : DocumentReader(file, file.begin(), false, separator, piece) {}
  // From where another was.
  DocumentReader(const TextFile& file, uint64_t offset, bool inside,
                 std::string_view separator = "<|endoftext|>", size_t piece = kPiece);
  bool next(DocumentPiece& piece);  // false: there is no more
  uint64_t offset() const { return offset_ + at_; }
  bool inside() const { return inside_; }  // of a document, by what was read

 private:
  std::string_view window();  // the next `piece` bytes; fewer at the end of the file
  size_t cut(std::string_view window) const;

  const TextFile* file_;
  std::string separator_, buffer_;
  uint64_t offset_;  // of the buffer
  size_t at_ = 0;    // in it
  bool inside_, all_read_ = false;
  size_t piece_;
};

}  // namespace kt::inline engine
