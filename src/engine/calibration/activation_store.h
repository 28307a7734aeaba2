// Rows of activations, as many as a calibration text has tokens: in memory, or past a bound in a file that
// nobody else sees. Plain bytes; what a row means is the caller's business.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "base/memory.h"

namespace kt::inline engine {

class ActivationStore {
 public:
  // In memory where `file` is empty; else in that file, which is unlinked at once and gone with this object.
  // Error(kMemory) where there is no room.
  ActivationStore(int64_t rows, size_t row_bytes, const std::string& file);
  ~ActivationStore();
  ActivationStore(const ActivationStore&) = delete;
  ActivationStore& operator=(const ActivationStore&) = delete;

  bool on_disk() const { return fd_ >= 0; }
  // Rows [first, first + count). Any thread; disjoint rows at the same time.
  void write(int64_t first, int64_t count, const void* rows);
  void read(int64_t first, int64_t count, void* rows) const;
  // Row picks[i] to place i.
  void gather(std::span<const int32_t> picks, void* rows) const;

 private:
  size_t row_bytes_;
  std::string path_;  // for messages
  int fd_ = -1;
  Buffer memory_;
};

}  // namespace kt::inline engine
