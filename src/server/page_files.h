// The files of the web page, as the build put them into the program.
#pragma once
#include <span>
#include <string_view>

namespace kt {

struct EmbeddedFile {
  std::string_view name;  // "page.css"
  std::string_view bytes;
};
std::span<const EmbeddedFile> page_files();

}  // namespace kt
