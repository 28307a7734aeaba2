#include "weights/torch/stored_zip.h"

#include <cstring>
#include <set>

#include "base/error.h"
#include "text/shown.h"
#include "weights/torch/torch_refusal.h"

namespace kt::inline weights {
namespace {

constexpr uint32_t kEndMark = 0x06054b50, kDirectoryMark = 0x02014b50, kEntryMark = 0x04034b50;
constexpr size_t kEndBytes = 22, kDirectoryBytes = 46, kEntryBytes = 30;
constexpr size_t kMostComment = 65535;
constexpr uint16_t kEncrypted = 1;  // of an entry's flags

// The number at `at`, which the caller knows to lie in the file.
template <typename T>
T number_at(std::span<const std::byte> file, size_t at) {
  T out;
  std::memcpy(&out, file.data() + at, sizeof(T));
  return out;
}

std::string_view text_at(std::span<const std::byte> file, size_t at, size_t bytes) {
  return {reinterpret_cast<const char*>(file.data()) + at, bytes};
}

// Where the record at the end begins: behind it is a comment of the length it names, and nothing else.
size_t end_record(std::span<const std::byte> file, std::string_view name) {
  for (size_t comment = 0; comment <= kMostComment && kEndBytes + comment <= file.size(); ++comment) {
    const size_t at = file.size() - kEndBytes - comment;
    if (number_at<uint32_t>(file, at) == kEndMark && number_at<uint16_t>(file, at + 20) == comment) return at;
  }
  fail("{}: a zip archive without its directory at the end: cut off or damaged", name);
}

// The bytes that an entry's own header leads to.
std::span<const std::byte> entry_bytes(std::span<const std::byte> file, size_t at, size_t size,
                                       std::string_view entry, std::string_view name) {
  if (at > file.size() || file.size() - at < kEntryBytes || number_at<uint32_t>(file, at) != kEntryMark)
    fail("{}: entry {}: no header at byte {}", name, shown(entry), at);
  const size_t data =
      at + kEntryBytes + number_at<uint16_t>(file, at + 26) + number_at<uint16_t>(file, at + 28);
  if (data > file.size() || file.size() - data < size)
    fail("{}: entry {}: {} bytes from byte {} on, the file has {}", name, shown(entry), size, data,
         file.size());
  return file.subspan(data, size);
}

}  // namespace

std::vector<ZipEntry> parse_stored_zip(std::span<const std::byte> file, std::string_view name) {
  const size_t end = end_record(file, name);
  const size_t entries = number_at<uint16_t>(file, end + 10), begin = number_at<uint32_t>(file, end + 16);
  if (entries == UINT16_MAX || begin == UINT32_MAX)
    refuse_torch_file(name, "an archive of more than 4 GiB or 65,534 entries");
  if (number_at<uint16_t>(file, end + 4) != 0) fail("{}: one part of a split archive", name);
  std::vector<ZipEntry> out;
  std::set<std::string_view> names;
  size_t at = begin;
  for (size_t i = 0; i < entries; ++i) {
    if (at > end || end - at < kDirectoryBytes || number_at<uint32_t>(file, at) != kDirectoryMark)
      fail("{}: entry {} of {}: no directory record at byte {}", name, i + 1, entries, at);
    const size_t name_bytes = number_at<uint16_t>(file, at + 28);
    const size_t next = at + kDirectoryBytes + name_bytes + number_at<uint16_t>(file, at + 30) +
                        number_at<uint16_t>(file, at + 32);
    if (next > end)
      fail("{}: entry {} of {}: its directory record ends behind the directory", name, i + 1, entries);
    const std::string_view entry = text_at(file, at + kDirectoryBytes, name_bytes);
    const size_t size = number_at<uint32_t>(file, at + 24);
    if (number_at<uint16_t>(file, at + 10) != 0)
      refuse_torch_file(name, text("entry {} is compressed", shown(entry)));
    if (number_at<uint16_t>(file, at + 8) & kEncrypted) fail("{}: entry {} is encrypted", name, shown(entry));
    if (number_at<uint32_t>(file, at + 20) != size)
      fail("{}: entry {}: stored in {} bytes, has {}", name, shown(entry), number_at<uint32_t>(file, at + 20),
           size);
    if (!names.insert(entry).second) fail("{}: two entries named {}", name, shown(entry));
    out.push_back(
        {entry, entry_bytes(file.first(end), number_at<uint32_t>(file, at + 42), size, entry, name)});
    at = next;
  }
  return out;
}

}  // namespace kt::inline weights
