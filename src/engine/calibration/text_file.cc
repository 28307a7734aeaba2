#include "engine/calibration/text_file.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "base/utf8.h"

namespace kt::inline engine {
namespace {

constexpr size_t kLineBuffer = size_t{32} << 10;

// Not UTF-8 by the marks that programs write in front, or by the zeros that Latin letters have there.
bool is_wide(std::string_view start) {
  using namespace std::string_view_literals;
  if (start.starts_with("\xFF\xFE"sv) || start.starts_with("\xFE\xFF"sv) ||
      start.starts_with("\0\0\xFE\xFF"sv))
    return true;
  return start.size() >= 2 && std::ranges::count(start, '\0') * 4 > std::ssize(start);
}

void check_utf8(std::string_view string, const TextFile& file, uint64_t offset) {
  if (is_valid_utf8(string)) return;
  size_t at = 0;
  for (Utf8Step step; (step = decode_utf8(string.substr(at))).valid;) at += step.bytes;
  fail("{}: not UTF-8 at byte {}: \"{}\"; convert it first, for instance with iconv -t UTF-8", file.path(),
       offset + at, printable(string.substr(at, 20)));
}

}  // namespace

TextFile::TextFile(std::string path) : path_(std::move(path)) {
  std::array<char, 4096> start;
  const std::string_view beginning(start.data(), read_at(0, start));
  if (beginning.starts_with("\xEF\xBB\xBF")) begin_ = 3;
  if (is_wide(beginning))
    fail("{}: UTF-16 or UTF-32; expected UTF-8: iconv -f UTF-16 -t UTF-8 converts it", path_);
}

size_t TextFile::read_at(uint64_t offset, std::span<char> into) const {
  const Descriptor file = open_regular(path_);
  size_t done = 0;
  while (done < into.size()) {
    const ssize_t got =
        ::pread(file.get(), into.data() + done, into.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("{}: {}", path_, std::strerror(errno));
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

bool TextLineReader::refill() {
  buffer_.resize(kLineBuffer);
  buffer_.resize(file_->read_at(next_, buffer_));
  next_ += buffer_.size();
  at_ = 0;
  return !buffer_.empty();
}

bool TextLineReader::next(TextLine& line) {
  for (;;) {
    line.text.clear();
    if (at_ == buffer_.size() && !refill()) return false;
    line.offset = next_ - (buffer_.size() - at_);
    line.number = number_++;
    uint64_t length = 0;
    do {
      const size_t end = std::min(buffer_.find('\n', at_), buffer_.size());
      length += end - at_;
      if (length <= kLongestLine) line.text.append(buffer_, at_, end - at_);
      at_ = end;
      if (end < buffer_.size()) break;
    } while (refill());
    if (at_ < buffer_.size()) ++at_;
    if (length > kLongestLine)
      fail("{} line {}: {} long; a line has at most {}", file_->path(), line.number, human_bytes(length),
           human_bytes(kLongestLine));
    if (line.text.find_first_not_of(" \t\r") != std::string::npos) return true;
  }
}

DocumentReader::DocumentReader(const TextFile& file, uint64_t offset, bool inside, std::string_view separator,
                               size_t piece)
    : file_(&file), separator_(separator), offset_(offset), inside_(inside), piece_(piece) {
  KT_CHECK(!separator.empty() && piece > separator.size() + 4);
}

std::string_view DocumentReader::window() {
  if (buffer_.size() - at_ < piece_ && !all_read_) {
    buffer_.erase(0, at_);
    offset_ += std::exchange(at_, 0);
    const size_t had = buffer_.size();
    buffer_.resize(2 * piece_);
    const size_t got = file_->read_at(offset_ + had, std::span(buffer_).subspan(had));
    buffer_.resize(had + got);
    all_read_ = buffer_.size() < 2 * piece_;
  }
  return std::string_view(buffer_).substr(at_, piece_);
}

// Where a piece ends that is no document's end: never within a separator or a character.
size_t DocumentReader::cut(std::string_view window) const {
  const std::string_view safe = window.substr(0, window.size() - separator_.size());
  if (const size_t line = safe.rfind('\n'); line != safe.npos)
    if (const size_t last = safe.find_last_not_of('\n', line); last != safe.npos) return last + 1;
  if (const size_t space = safe.rfind(' '); space != safe.npos && space > 0) return space;
  size_t at = safe.size();
  for (int i = 0; i < 3 && (static_cast<uint8_t>(window[at]) & 0xC0) == 0x80; ++i) --at;
  return at;
}

bool DocumentReader::next(DocumentPiece& piece) {
  for (;;) {
    const std::string_view here = window();
    if (here.empty() && !inside_) return false;
    if (!inside_ && here.front() == '\n') {
      at_ += std::min(here.find_first_not_of('\n'), here.size());
      continue;
    }
    const size_t found = here.find(separator_);
    piece = {.text = {},
             .offset = offset(),
             .begins = !inside_,
             .ends = here.size() < piece_ || found != here.npos};
    const size_t end = piece.ends ? std::min(found, here.size()) : cut(here);
    piece.text = here.substr(0, end);
    if (piece.ends) piece.text.resize(piece.text.find_last_not_of('\n') + 1);
    check_utf8(piece.text, *file_, offset());
    at_ += found == end ? end + separator_.size() : end;
    inside_ = !piece.ends;
    if (!piece.begins || !piece.text.empty()) return true;
  }
}

}  // namespace kt::inline engine
