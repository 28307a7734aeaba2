// A file inside the program (cmake/embed.cmake).
#pragma once
#include <string_view>

namespace kt {

struct EmbeddedFile {
  std::string_view name, bytes;
};

}  // namespace kt
