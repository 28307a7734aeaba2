#include "base/memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/cgroups.h"
#include "base/checked.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"

namespace kt::inline base {

namespace {

constexpr size_t kAlign = 64;
constexpr size_t kMapFrom = size_t{1} << 20;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kRefuseFrom = size_t{256} << 20;

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

// The number after "key" in a file of "key   123 kB" lines; nullopt if there is none.
std::optional<uint64_t> number_after(std::string_view info, std::string_view key) {
  for (size_t at = 0; at < info.size();) {
    const size_t end = std::min(info.find('\n', at), info.size());
    const std::string_view line = info.substr(at, end - at);
    at = end + 1;
    if (!line.starts_with(key)) continue;
    const size_t digits = line.find_first_of("0123456789", key.size());
    if (digits == std::string_view::npos) return std::nullopt;
    uint64_t value = 0;
    if (std::from_chars(line.data() + digits, line.data() + line.size(), value).ec != std::errc()) continue;
    return value;
  }
  return std::nullopt;
}

uint64_t meminfo_bytes(const std::string& root, std::string_view key) {
  const std::string info = read_small_file(root + "/proc/meminfo").value_or("");
  const auto kib = number_after(info, key);
  return kib ? *kib << 10 : kNoLimit;
}

struct Limits {
  uint64_t limit = kNoLimit;     // the least limit on the way to the root
  uint64_t headroom = kNoLimit;  // the least of limit - use
};

// Where a memory cgroup's files are, by version of the interface.
struct CgroupFiles {
  std::string mount, limit, usage, inactive, active;
};

void add_limits(Limits& limits, const CgroupFiles& files, std::string path) {
  // A limit on any ancestor binds. Inside a container the path may not exist below the mount; its root does.
  for (;;) {
    while (path.ends_with('/')) path.pop_back();
    const std::string folder = files.mount + path + "/";
    const auto limit = read_small_file(folder + files.limit);
    const auto most = limit ? number_after(*limit, "") : std::nullopt;  // "max" has no digits
    if (most) {
      const std::string usage = read_small_file(folder + files.usage).value_or("");
      const std::string stat = read_small_file(folder + "memory.stat").value_or("");
      const uint64_t used = number_after(usage, "").value_or(0);
      const uint64_t cache =
          number_after(stat, files.inactive).value_or(0) + number_after(stat, files.active).value_or(0);
      const uint64_t held = used - std::min(used, cache);
      limits.limit = std::min(limits.limit, *most);
      limits.headroom = std::min(limits.headroom, *most - std::min(*most, held));
    }
    if (path.empty()) return;
    path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

Limits cgroup_limits(const std::string& root) {
  const std::string base = root + "/sys/fs/cgroup";
  const CgroupFiles v1{base + "/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                       "total_inactive_file ", "total_active_file "};
  CgroupFiles v2{base, "memory.max", "memory.current", "inactive_file ", "active_file "};
  CgroupFiles hybrid = v2;
  hybrid.mount = base + "/unified";

  Limits limits;
  const std::string groups = read_small_file(root + "/proc/self/cgroup").value_or("");
  for_each_cgroup(groups, [&](const std::string& controllers, const std::string& path) {
    if (controllers.find(",memory,") != std::string::npos) add_limits(limits, v1, path);
    if (controllers != ",,") return;
    add_limits(limits, v2, path);
    add_limits(limits, hybrid, path);
  });
  return limits;
}

[[noreturn]] void out_of_memory(size_t bytes, std::string_view why) {
  fail_as(ErrorKind::kMemory, "memory: {} ({} bytes) needed, {} available: {}", human_bytes(bytes), bytes,
          human_bytes(available_memory()), why);
}

std::byte* map_bytes(size_t bytes, int extra_flags) {
  void* const got =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | extra_flags, -1, 0);
  if (got == MAP_FAILED) return nullptr;
  return static_cast<std::byte*>(got);
}

// A mapping that starts at a multiple of `align`: one that is `align` too long, cut at both ends.
std::byte* map_aligned(size_t bytes, size_t align) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (align <= page) return map_bytes(bytes, 0);
  std::byte* const start = map_bytes(checked_add(bytes, align, "buffer"), 0);
  if (start == nullptr) return nullptr;
  const size_t over = reinterpret_cast<uintptr_t>(start) % align;
  const size_t head = over == 0 ? 0 : align - over;
  if (head > 0) munmap(start, head);
  munmap(start + head + bytes, align - head);
  return start + head;
}

void place_on_node(std::byte* data, size_t bytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  constexpr size_t kWordBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<size_t>(node) / kWordBits + 1);
  mask[static_cast<size_t>(node) / kWordBits] = 1ul << static_cast<size_t>(node) % kWordBits;
  // The kernel reads one bit fewer than it is told.
  if (syscall(SYS_mbind, data, bytes, kPreferred, mask.data(), mask.size() * kWordBits + 1, 0) == 0) return;
  log_once(LogLevel::kWarning, "memory: cannot place pages on NUMA node {} ({}); they go where first touched",
           node, std::generic_category().message(errno));
}

}  // namespace

Buffer::Buffer(size_t bytes, BufferOptions options) {
  if (bytes == 0) return;
  if (bytes >= kRefuseFrom && bytes > available_memory())
    out_of_memory(bytes, "granting it would have the process killed later");
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (options.huge == HugePages::kRequire) {
    const uint64_t told = meminfo_bytes("", "Hugepagesize:");
    mapped_ = checked_round_up(bytes, told == kNoLimit || told == 0 ? kHugePage : told, "buffer");
    data_ = map_bytes(mapped_, MAP_HUGETLB);
    if (data_ == nullptr) out_of_memory(bytes, "too few reserved huge pages (see /proc/sys/vm/nr_hugepages)");
  } else if (bytes >= kMapFrom || (options.node >= 0 && bytes >= page)) {
    const bool huge = options.huge == HugePages::kAdvise && bytes >= kHugePage;
    mapped_ = checked_round_up(bytes, page, "buffer");
    data_ = map_aligned(mapped_, huge ? std::max(kHugePage, page) : page);
    if (data_ == nullptr) out_of_memory(bytes, std::generic_category().message(errno));
    // Advice only: a kernel without transparent huge pages answers EINVAL.
    if (huge) madvise(data_, mapped_, MADV_HUGEPAGE);
    if (options.huge == HugePages::kNone) madvise(data_, mapped_, MADV_NOHUGEPAGE);
  } else {
    const size_t rounded = checked_round_up(bytes, kAlign, "buffer");
    data_ = static_cast<std::byte*>(std::aligned_alloc(kAlign, rounded));
    if (data_ == nullptr) out_of_memory(bytes, std::generic_category().message(errno));
    std::memset(data_, 0, rounded);
  }
  size_ = bytes;
  if (mapped_ > 0 && options.node >= 0) place_on_node(data_, mapped_, options.node);
}

Buffer::~Buffer() { release(); }

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapped_(std::exchange(other.mapped_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  release();
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  mapped_ = std::exchange(other.mapped_, 0);
  return *this;
}

void Buffer::release() noexcept {
  if (mapped_ > 0)
    munmap(data_, mapped_);
  else
    std::free(data_);
}

uint64_t available_memory(const std::string& root) {
  return std::min(meminfo_bytes(root, "MemAvailable:"), cgroup_limits(root).headroom);
}

uint64_t total_memory(const std::string& root) {
  return std::min(meminfo_bytes(root, "MemTotal:"), cgroup_limits(root).limit);
}

uint64_t own_memory(const std::string& root) {
  const std::string status = read_small_file(root + "/proc/self/status").value_or("");
  return number_after(status, "RssAnon:").value_or(0) << 10;
}

std::string huge_page_mode(const std::string& root) {
  const std::string modes = read_small_file(root + "/sys/kernel/mm/transparent_hugepage/enabled")
                                .value_or("");  // "always [madvise] never"
  const size_t open = modes.find('['), close = modes.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return "unknown";
  return modes.substr(open + 1, close - open - 1);
}

}  // namespace kt::inline base
