#include "cuda/testing/test_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace kt::inline cuda::test_driver {
namespace {

struct Block {
  Place place;
  size_t bytes;
  std::byte* touched;    // where the bytes can be read and written
  int device = 0;        // whose, of device memory
  bool foreign = false;  // the caller's own memory
};

struct Blocks {
  std::mutex mutex;
  std::map<const std::byte*, Block> by_address;
  int kernels = 0;                  // that run
  std::map<int, size_t> used = {};  // of devices' memory

  bool open = false;

  int protection() const { return open ? PROT_READ | PROT_WRITE : PROT_NONE; }
  void protect(bool opens) {
    if (open == opens) return;
    open = opens;
    for (const auto& [address, block] : by_address)
      if (block.place == Place::kDevice)
        ::mprotect(const_cast<std::byte*>(address), block.bytes, protection());
  }
};

constexpr size_t kDefaultMemory = size_t{8} << 30, kSliceMemory = size_t{1} << 30, kPage = 4096;

Blocks& blocks() {
  static Blocks& all = *std::make_unique<Blocks>().release();
  return all;
}

// The block that holds the address, or the end.
auto block_at(const std::byte* address) {
  auto& all = blocks().by_address;
  auto at = all.upper_bound(address);
  if (at == all.begin()) return all.end();
  --at;
  return address < at->first + at->second.bytes ? at : all.end();
}

std::byte* map(size_t bytes, int protection, int flags, int file) {
  void* const address = ::mmap(nullptr, bytes, protection, flags, file, 0);
  return address == MAP_FAILED ? nullptr : static_cast<std::byte*>(address);
}

}  // namespace

void* allocate(Place place, size_t bytes, int device) {
  std::byte* address = nullptr;
  std::byte* touched = nullptr;
  if (place == Place::kDevice && bytes > device_memory(device).free) return nullptr;
  if (place == Place::kPinned) {
    address = touched = map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  } else {
    const int file = ::memfd_create("device memory", MFD_CLOEXEC);
    if (file < 0) return nullptr;
    if (::ftruncate(file, static_cast<off_t>(bytes)) == 0) {
      // Behind it nothing can be touched: a kernel that runs over the end is found out there.
      address = map(bytes + kPage, PROT_NONE, MAP_SHARED, file);
      touched = map(bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file);
    }
    ::close(file);
  }
  if (!address || !touched) return nullptr;
  std::memset(touched, 0xA5, bytes);  // CUDA promises no zeros
  const std::lock_guard lock(blocks().mutex);
  blocks().by_address[address] = {place, bytes, touched, device};
  if (place == Place::kDevice) {
    blocks().used[device] += bytes;
    ::mprotect(address, bytes, blocks().protection());
  }
  return address;
}

bool release(Place place, const void* address) {
  const std::lock_guard lock(blocks().mutex);
  const auto at = blocks().by_address.find(static_cast<const std::byte*>(address));
  if (at == blocks().by_address.end() || at->second.place != place || at->second.foreign) return false;
  if (place == Place::kDevice) blocks().used[at->second.device] -= at->second.bytes;
  ::munmap(const_cast<std::byte*>(at->first), at->second.bytes + (place == Place::kDevice ? kPage : 0));
  if (at->second.touched != at->first) ::munmap(at->second.touched, at->second.bytes);
  blocks().by_address.erase(at);
  return true;
}

bool lock_pages(void* address, size_t bytes) {
  const std::lock_guard lock(blocks().mutex);
  auto* const first = static_cast<std::byte*>(address);
  auto& all = blocks().by_address;
  const auto next = all.lower_bound(first);
  if (block_at(first) != all.end() || (next != all.end() && next->first < first + bytes)) return false;
  all[first] = {.place = Place::kPinned, .bytes = bytes, .touched = first, .foreign = true};
  return true;
}

bool unlock_pages(const void* address) {
  const std::lock_guard lock(blocks().mutex);
  const auto at = blocks().by_address.find(static_cast<const std::byte*>(address));
  if (at == blocks().by_address.end() || !at->second.foreign) return false;
  blocks().by_address.erase(at);
  return true;
}

Place place_of(const void* address) {
  const std::lock_guard lock(blocks().mutex);
  const auto at = block_at(static_cast<const std::byte*>(address));
  return at == blocks().by_address.end() ? Place::kOrdinary : at->second.place;
}

std::byte* reach(Place place, const void* address, size_t bytes) {
  const auto* const first = static_cast<const std::byte*>(address);
  if (place == Place::kOrdinary) return const_cast<std::byte*>(first);
  const std::lock_guard lock(blocks().mutex);
  const auto at = block_at(first);
  if (at == blocks().by_address.end() || at->second.place != place) return nullptr;
  const size_t offset = first - at->first;
  return bytes <= at->second.bytes - offset ? at->second.touched + offset : nullptr;
}

DeviceMemoryOpen::DeviceMemoryOpen() {
  const std::lock_guard lock(blocks().mutex);
  ++blocks().kernels;
  blocks().protect(true);
}
DeviceMemoryOpen::~DeviceMemoryOpen() {
  const std::lock_guard lock(blocks().mutex);
  --blocks().kernels;
}

void close_device_memory() {
  const std::lock_guard lock(blocks().mutex);
  if (blocks().kernels == 0) blocks().protect(false);
}

bool is_slice() {
  const char* const value = std::getenv("KT_TEST_CUDA_MIG");
  return value && *value == '1';
}

MemoryLeft device_memory(int device) {
  const char* value = std::getenv("KT_TEST_CUDA_MEMORY");
  for (int i = 0; value && i < device && std::strchr(value, ','); ++i) value = std::strchr(value, ',') + 1;
  const size_t total = value ? std::strtoull(value, nullptr, 10) : is_slice() ? kSliceMemory : kDefaultMemory;
  const std::lock_guard lock(blocks().mutex);
  return {total, total - std::min(total, blocks().used[device])};
}

}  // namespace kt::inline cuda::test_driver
