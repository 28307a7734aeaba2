// The entries of a zip archive that are stored as they are, which is how torch.save keeps everything. Nothing is
// unpacked and nothing copied: entries are views into the file.
#pragma once
#include <span>
#include <string_view>
#include <vector>

namespace kt::inline weights {

struct ZipEntry {
  std::string_view name;
  std::span<const std::byte> bytes;
};

// As the directory at the end of the archive lists them. Error(kInput) naming `name` unless every entry is stored
// plainly, lies before the directory and has a name of its own; archives of more than 4 GiB or 65,534 entries are
// refused. Checksums are not looked at: torch can be told to write none.
std::vector<ZipEntry> parse_stored_zip(std::span<const std::byte> file, std::string_view name);

}  // namespace kt::inline weights
