// Blocks of memory that training calls keep from a forward to its backward, used again by later calls: pages that the
// operating system has filled with zeros once need not be so again.
#pragma once
#include <mutex>
#include <vector>

#include "base/memory.h"

namespace kt::inline nn {

// Any thread. It holds what is not in use now: as much as was kept at once at most.
class KeptMemory {
 public:
  // At least so many bytes on that node, whatever they hold.
  Buffer take(size_t bytes, int memory_node);
  void give(Buffer buffer, int memory_node);
  size_t bytes() const;  // held, not in use
  void release();        // gives what is held to the system

 private:
  struct Held {
    Buffer buffer;
    int memory_node;
  };
  mutable std::mutex mutex_;
  std::vector<Held> held_;
};

}  // namespace kt::inline nn
