// The files of the web page, as the build put them into the program.
#pragma once
#include <span>

#include "base/embedded_file.h"

namespace kt::inline server {

std::span<const EmbeddedFile> page_files();  // "page.css"

}  // namespace kt::inline server
