// Mapped files that end before their mapping does. Touching what is gone (the file shrank: a copy over it, a
// download; or its disk failed) is a SIGBUS for the thread that touches it. From the first mapping on a handler
// of ours answers those in mapped files: from there on the mapping holds zeros, the place is written down, and
// the thread goes on. So nothing dies, and nothing may be believed: whoever has used mapped bytes for
// something that lasts asks here before it says that it is done. A SIGBUS anywhere else goes to whoever handled
// it before us.
#pragma once
#include <cstddef>
#include <optional>
#include <span>
#include <string>

namespace kt::inline base {

// Error(kInput) naming file and place, if a file that is mapped now was found to end too early. Without one a
// load and a comparison.
void check_mapped_files();
std::optional<std::string> broken_mapping();  // the same as a string
// Those of the first file ever that was, mapped still or not.
std::optional<std::string> first_broken_mapping();

// Reads a byte of every page. For bytes that are to be handed to the kernel, which answers EFAULT where
// reading them would bring the handler.
void touch_pages(std::span<const std::byte> bytes) noexcept;

// A mapping that is watched for as long as the object lives; it has to end before the mapping does. Move-only.
class MappingWatch {
 public:
  MappingWatch() = default;
  MappingWatch(std::span<const std::byte> mapped, const std::string& path);
  ~MappingWatch();
  MappingWatch(MappingWatch&& other) noexcept;
  MappingWatch& operator=(MappingWatch&& other) noexcept;

  struct Range;

 private:
  Range* range_ = nullptr;
};

}  // namespace kt::inline base
