// A file inside the program (cmake/embed.cmake).
#pragma once
#include <string_view>

namespace kt::inline base {

struct EmbeddedFile {
  std::string_view name, bytes;
};

}  // namespace kt::inline base
