#include "engine/calibration/activation_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/checked.h"
#include "base/error.h"

namespace kt::inline engine {

ActivationStore::ActivationStore(int64_t rows, size_t row_bytes, const std::string& file)
    : row_bytes_(row_bytes), path_(file) {
  const size_t bytes = checked_mul(static_cast<size_t>(rows), row_bytes, "activations");
  if (file.empty()) {
    memory_ = Buffer(bytes);
    return;
  }
  unlink(file.c_str());  // of a killed run; never written into
  fd_ = open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd_ < 0) fail("{}: cannot create: {}", file, std::generic_category().message(errno));
  unlink(file.c_str());
  if (const int code = posix_fallocate(fd_, 0, static_cast<off_t>(bytes)); code != 0) {
    close(fd_);
    fail_as(ErrorKind::kMemory, "{}: no room for {} of activations: {}", file, human_bytes(bytes),
            std::generic_category().message(code));
  }
}

ActivationStore::~ActivationStore() {
  if (fd_ >= 0) close(fd_);
}

void ActivationStore::write(int64_t first, int64_t count, const void* rows) {
  const size_t at = static_cast<size_t>(first) * row_bytes_, bytes = static_cast<size_t>(count) * row_bytes_;
  if (fd_ < 0) {
    std::memcpy(memory_.data() + at, rows, bytes);
    return;
  }
  for (size_t done = 0; done < bytes;) {
    const ssize_t wrote =
        pwrite(fd_, static_cast<const std::byte*>(rows) + done, bytes - done, static_cast<off_t>(at + done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) fail("{}: cannot write activations: {}", path_, std::generic_category().message(errno));
    done += static_cast<size_t>(wrote);
  }
}

void ActivationStore::read(int64_t first, int64_t count, void* rows) const {
  const size_t at = static_cast<size_t>(first) * row_bytes_, bytes = static_cast<size_t>(count) * row_bytes_;
  if (fd_ < 0) {
    std::memcpy(rows, memory_.data() + at, bytes);
    return;
  }
  for (size_t done = 0; done < bytes;) {
    const ssize_t got =
        pread(fd_, static_cast<std::byte*>(rows) + done, bytes - done, static_cast<off_t>(at + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) fail("{}: cannot read activations: {}", path_, std::generic_category().message(errno));
    done += static_cast<size_t>(got);
  }
}

void ActivationStore::gather(std::span<const int32_t> picks, void* rows) const {
  auto* out = static_cast<std::byte*>(rows);
  // Neighbours are read together.
  for (size_t i = 0; i < picks.size();) {
    size_t next = i + 1;
    while (next < picks.size() && picks[next] == picks[next - 1] + 1) ++next;
    read(picks[i], static_cast<int64_t>(next - i), out + i * row_bytes_);
    i = next;
  }
}

}  // namespace kt::inline engine
