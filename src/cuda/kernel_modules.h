// Our kernels as the driver takes them: files of its assembly, which the build unpacked from kernels.tar.xz.
#pragma once
#include <span>

#include "base/embedded_file.h"

namespace kt::inline cuda {

std::span<const EmbeddedFile> kernel_modules();  // "rows.ptx"; zero-terminated

}  // namespace kt::inline cuda
