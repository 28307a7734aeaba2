#include "base/mapped_faults.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fork_mutex.h"

namespace kt::inline base {

// What the handler reads is atomic and never freed: it may come at any time, in any thread.
struct MappingWatch::Range {
  std::atomic<uintptr_t> begin{0}, end{0};    // 0, 0: nothing is mapped
  std::atomic<uint64_t> missing{UINT64_MAX};  // offset of the first byte that was asked for in vain
  std::string path;
  Range* next = nullptr;  // in the list of all
};

namespace {

using Range = MappingWatch::Range;

constinit std::atomic<Range*> ranges{nullptr};
constinit std::atomic<int> broken_ranges{0};  // of those that are mapped
struct sigaction handler_before{};            // written before the first range is there
uintptr_t page_bytes = 4096;

static_assert(std::atomic<uintptr_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

struct WatchState {
  ForkMutex mutex{ForkLock::kMappedFiles};
  size_t made = 0;
  std::vector<Range*> unused;  // has room for all that were made
  std::string first;           // that was broken and is unmapped by now
};

WatchState& watch_state() {
  static WatchState& state = *std::make_unique<WatchState>().release();  // for ever: see ForkMutex
  return state;
}

[[maybe_unused]] const WatchState& watch_made_early = watch_state();  // before threads that fork

// All that is called from here on is a system call or an atomic: this runs in a signal handler.

// Zeros from `address` on to the end. The rest goes too: what is read through this mapping is lost anyway, and
// a file of gigabytes would come back here page by page.
bool put_zeros(Range& range, uintptr_t address) {
  const uintptr_t begin = range.begin.load(), end = range.end.load(), page = address & ~(page_bytes - 1);
  const uint64_t offset = address - begin;
  uint64_t before = range.missing.load();
  while (offset < before && !range.missing.compare_exchange_weak(before, offset)) {
  }
  if (before == UINT64_MAX) broken_ranges.fetch_add(1);
  return mmap(reinterpret_cast<void*>(page), end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
              -1, 0) != MAP_FAILED;
}

bool answer_fault(uintptr_t address) {
  for (Range* range = ranges.load(); range; range = range->next)
    if (address >= range->begin.load() && address < range->end.load()) return put_zeros(*range, address);
  return false;
}

extern "C" void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int code = errno;
  // Positive: the kernel's, with an address; others are sent by somebody.
  if (info->si_code > 0 && answer_fault(reinterpret_cast<uintptr_t>(info->si_addr))) {
    errno = code;
    return;
  }
  if (handler_before.sa_flags & SA_SIGINFO) {
    handler_before.sa_sigaction(signal, info, context);
  } else if (handler_before.sa_handler != SIG_DFL && handler_before.sa_handler != SIG_IGN) {
    handler_before.sa_handler(signal);
  } else {
    // As if we were not there: it comes again when this returns, or is sent again.
    sigaction(signal, &handler_before, nullptr);
    if (info->si_code <= 0) kill(getpid(), signal);
  }
  errno = code;
}

// From here on nothing is called by the handler.

void install_handler() {
  page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  sigaction(SIGBUS, nullptr, &handler_before);
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
}

std::string describe(const Range& range) {
  return text("{}: nothing at byte {} of {} any more: it shrank, or its disk failed, while it was read",
              range.path, range.missing.load(), range.end.load() - range.begin.load());
}

}  // namespace

MappingWatch::MappingWatch(std::span<const std::byte> mapped, const std::string& path) {
  static std::once_flag installed;
  std::call_once(installed, install_handler);
  WatchState& state = watch_state();
  const std::lock_guard lock(state.mutex);
  if (state.unused.empty()) {
    auto made = std::make_unique<Range>();
    state.unused.reserve(++state.made);
    made->next = ranges.load();
    state.unused.push_back(made.get());
    ranges.store(made.release());
  }
  range_ = state.unused.back();
  range_->path = path;
  state.unused.pop_back();
  const auto begin = reinterpret_cast<uintptr_t>(mapped.data());
  range_->end.store(begin + mapped.size());
  range_->begin.store(begin);
}

// NOLINTNEXTLINE(bugprone-exception-escape): the state was made by the constructor.
MappingWatch::~MappingWatch() {
  if (!range_) return;
  WatchState& state = watch_state();
  const std::lock_guard lock(state.mutex);
  if (range_->missing.load() != UINT64_MAX) {
    if (state.first.empty()) state.first = describe(*range_);
    broken_ranges.fetch_sub(1);
  }
  range_->end.store(0);
  range_->begin.store(0);
  range_->missing.store(UINT64_MAX);
  state.unused.push_back(range_);
}

MappingWatch::MappingWatch(MappingWatch&& other) noexcept : range_(std::exchange(other.range_, nullptr)) {}

MappingWatch& MappingWatch::operator=(MappingWatch&& other) noexcept {
  std::swap(range_, other.range_);
  return *this;
}

std::optional<std::string> broken_mapping() {
  if (broken_ranges.load() == 0) return std::nullopt;
  const std::lock_guard lock(watch_state().mutex);
  for (const Range* range = ranges.load(); range; range = range->next)
    if (range->missing.load() != UINT64_MAX) return describe(*range);
  return std::nullopt;
}

std::optional<std::string> first_broken_mapping() {
  {
    const std::lock_guard lock(watch_state().mutex);
    if (!watch_state().first.empty()) return watch_state().first;
  }
  return broken_mapping();
}

void check_mapped_files() {
  if (const auto broken = broken_mapping()) throw Error(ErrorKind::kInput, *broken);
}

void touch_pages(std::span<const std::byte> bytes) noexcept {
  constexpr size_t kSmallestPage = 4096;
  const volatile std::byte* const at = bytes.data();
  for (size_t i = 0; i < bytes.size(); i += kSmallestPage) (void)at[i];
  if (!bytes.empty()) (void)at[bytes.size() - 1];
}

}  // namespace kt::inline base
