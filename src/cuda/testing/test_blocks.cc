// Fibers, and the order they run in: block_runner.h.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/testing/block_runner.h"

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size);
#endif
#if defined(__SANITIZE_THREAD__)
extern "C" void* __tsan_get_current_fiber();
extern "C" void* __tsan_create_fiber(unsigned flags);
extern "C" void __tsan_destroy_fiber(void* fiber);
extern "C" void __tsan_switch_to_fiber(void* fiber, unsigned flags);
#endif

// kt_test_switch(save, load): registers that a call keeps go to the stack that ends at *save, those of `load` come
// back.
extern "C" void kt_test_switch(void** save, void* load);
extern "C" void kt_test_begin();  // where a new fiber begins
#if defined(__x86_64__)
asm(R"(
.text
.globl kt_test_switch
.hidden kt_test_switch
.type kt_test_switch, @function
kt_test_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kt_test_switch, .-kt_test_switch
)");
constexpr size_t kSaved = 7 * 8, kReturnAt = 6 * 8;  // six registers, then where to go on
constexpr size_t kEntrySkew = 8;                     // a function begins 8 bytes below a multiple of 16
#elif defined(__aarch64__)
asm(R"(
.text
.globl kt_test_switch
.hidden kt_test_switch
.type kt_test_switch, %function
kt_test_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size kt_test_switch, .-kt_test_switch
)");
constexpr size_t kSaved = 160, kReturnAt = 88, kEntrySkew = 0;
#else
#error "fibers are written for x86-64 and arm64"
#endif

namespace kt::inline cuda::gpu {
namespace {

constexpr size_t kStack = 64 << 10, kSharedBytes = 228 << 10;
constexpr int kMostThreads = 1024, kLanes = 32;

enum class State : uint8_t { kReady, kAtBlock, kAtWarp, kDone };

struct Fiber {
  Lane lane;
  State state = State::kDone;
  void* stack = nullptr;  // where it stands
  size_t shared_at = 0;   // of the block's memory, handed out in the order of the kernel's declarations
  // To the others of its warp, in turns: the next exchange may begin before all have read.
  std::array<uint32_t, 6> given[2] = {};
  int turn = 0;
  struct Copy {
    void* to;
    const void* from;
    int group;
  };
  std::vector<Copy> copies;  // under way
  int group = 0;             // of copies
#if defined(__SANITIZE_ADDRESS__)
  void* shadow = nullptr;
#endif
#if defined(__SANITIZE_THREAD__)
  void* tsan = nullptr;
#endif
};

// The fibers of one thread of the operating system, used for block after block.
struct BlockRunner {
  std::byte* stacks;  // [kMostThreads, kStack]
  std::unique_ptr<std::byte[]> shared{new std::byte[kSharedBytes]};
  size_t shared_used = 0;  // by the block that runs
  std::vector<Fiber> fibers;
  std::vector<int> order;
  void* home = nullptr;
  Fiber* running = nullptr;
  const KnownKernel* kernel = nullptr;
  const void* arguments = nullptr;
  const char* wrong = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  void* home_shadow = nullptr;
  const void* home_bottom = nullptr;
  size_t home_size = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void* home_tsan = nullptr;
#endif

  BlockRunner()
      : stacks(static_cast<std::byte*>(::mmap(nullptr, kMostThreads * kStack, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))),
        fibers(kMostThreads) {
    if (stacks == MAP_FAILED) std::abort();
#if defined(__SANITIZE_THREAD__)
    for (Fiber& fiber : fibers) fiber.tsan = __tsan_create_fiber(0);
#endif
  }
  ~BlockRunner() {
#if defined(__SANITIZE_THREAD__)
    for (Fiber& fiber : fibers) __tsan_destroy_fiber(fiber.tsan);
#endif
    ::munmap(stacks, kMostThreads * kStack);
  }

  void begin(int index, const Lane& of);
  void resume(Fiber& fiber);
  void leave(State state);
  bool release(int threads);
  void run_block(const Lane& first, int threads, std::minstd_rand& random);
};

thread_local BlockRunner* runner = nullptr;

BlockRunner& own_runner() {
  thread_local std::unique_ptr<BlockRunner> own = std::make_unique<BlockRunner>();
  return *own;
}

void BlockRunner::begin(int index, const Lane& of) {
  Fiber& fiber = fibers[static_cast<size_t>(index)];
  std::byte* const top = stacks + (static_cast<size_t>(index) + 1) * kStack - 64 - kEntrySkew;
  std::byte* const at = top - kSaved;
  std::memset(at, 0, kSaved);
  void (*const entry)() = kt_test_begin;
  std::memcpy(at + kReturnAt, &entry, sizeof entry);
  fiber.lane = of;
  fiber.lane.thread = index;
  fiber.state = State::kReady;
  fiber.stack = at;
  fiber.shared_at = 0;
  fiber.turn = 0;
  fiber.copies.clear();
  fiber.group = 0;
}

void BlockRunner::resume(Fiber& fiber) {
  running = &fiber;
  lane = &fiber.lane;
#if defined(__SANITIZE_ADDRESS__)
  const size_t index = static_cast<size_t>(&fiber - fibers.data());
  __sanitizer_start_switch_fiber(&home_shadow, stacks + index * kStack, kStack);
#endif
#if defined(__SANITIZE_THREAD__)
  home_tsan = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.tsan, 0);
#endif
  kt_test_switch(&home, fiber.stack);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(home_shadow, nullptr, nullptr);
#endif
}

// From a fiber to whoever runs them.
void BlockRunner::leave(State state) {
  Fiber& fiber = *running;
  fiber.state = state;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(state == State::kDone ? nullptr : &fiber.shadow, home_bottom, home_size);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(home_tsan, 0);
#endif
  kt_test_switch(&fiber.stack, home);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.shadow, &home_bottom, &home_size);
#endif
}

// Lets those go on whose wait is over; false: nobody can.
bool BlockRunner::release(int threads) {
  const auto all = [&](int begin, int end, State state) {
    for (int i = begin; i < end; ++i)
      if (fibers[static_cast<size_t>(i)].state != state) return false;
    return true;
  };
  const auto wake = [&](int begin, int end) {
    for (int i = begin; i < end; ++i) fibers[static_cast<size_t>(i)].state = State::kReady;
  };
  if (all(0, threads, State::kAtBlock)) return wake(0, threads), true;
  bool any = false;
  for (int warp = 0; warp < threads; warp += kLanes) {
    if (warp + kLanes > threads || !all(warp, warp + kLanes, State::kAtWarp)) continue;
    wake(warp, warp + kLanes);
    any = true;
  }
  return any;
}

void BlockRunner::run_block(const Lane& first, int threads, std::minstd_rand& random) {
  shared_used = 0;
  for (int i = 0; i < threads; ++i) begin(i, first);
  order.resize(static_cast<size_t>(threads));
  std::iota(order.begin(), order.end(), 0);
  for (;;) {
    std::shuffle(order.begin(), order.end(), random);
    bool ready = false, done = true;
    for (const int i : order) {
      Fiber& fiber = fibers[static_cast<size_t>(i)];
      if (fiber.state == State::kReady) resume(fiber), ready = true;
      if (wrong) return;
      done &= fiber.state == State::kDone;
    }
    if (done) return;
    if (!release(threads) && !ready) {
      wrong = "threads of a block wait for others that do not come";
      return;
    }
  }
}

}  // namespace

thread_local const Lane* lane = nullptr;

namespace {

const KnownKernel* first_kernel = nullptr;

}  // namespace

KnownKernel::KnownKernel(const char* name, size_t argument_bytes, int most_threads, void (*run)(const void*))
    : name(name), argument_bytes(argument_bytes), most_threads(most_threads), run(run), next(first_kernel) {
  first_kernel = this;
}

const KnownKernel* KnownKernel::find(std::string_view name) {
  const KnownKernel* at = first_kernel;
  while (at && at->name != name) at = at->next;
  return at;
}

const char* run_grid(const KnownKernel& kernel, const void* arguments, const Grid& grid, uint64_t seed) {
  BlockRunner& own = own_runner();
  runner = &own;
  own.kernel = &kernel;
  own.arguments = arguments;
  own.wrong = nullptr;
  std::minstd_rand random(static_cast<unsigned>(seed * 2 + 1));
  std::vector<int> blocks(static_cast<size_t>(grid.x) * static_cast<size_t>(grid.y));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), random);
  for (const int block : blocks) {
    const Lane first{
        .threads = grid.threads, .block = block % grid.x, .block_y = block / grid.x, .blocks = grid.x};
    own.run_block(first, grid.threads, random);
    if (own.wrong) break;
  }
  return own.wrong;
}

void* shared_memory(size_t bytes) {
  Fiber& fiber = *runner->running;
  std::byte* const all = runner->shared.get();
  std::byte* const found = all + fiber.shared_at;
  fiber.shared_at += (bytes + 63) / 64 * 64;
  if (fiber.shared_at > kSharedBytes) {
    runner->wrong = "a block shares more memory than there is";
    runner->leave(State::kDone);
  }
  if (fiber.shared_at > runner->shared_used) {  // who comes first: what is read before it is written is NaN
    std::memset(all + runner->shared_used, 0xFF, fiber.shared_at - runner->shared_used);
    runner->shared_used = fiber.shared_at;
  }
  return found;
}

void wait_for_block() { runner->leave(State::kAtBlock); }

namespace {

// What all lanes of the warp gave, by lane.
struct Given {
  const Fiber* first;
  int turn;
  const std::array<uint32_t, 6>& operator[](int lane) const { return first[lane].given[turn]; }
};

Given give(const std::array<uint32_t, 6>& words) {
  Fiber& mine = *runner->running;
  const int turn = mine.turn;
  mine.given[turn] = words;
  mine.turn ^= 1;
  runner->leave(State::kAtWarp);
  return {&runner->fibers[static_cast<size_t>(mine.lane.thread / kLanes * kLanes)], turn};
}

float half_of(uint32_t pair, int which) { return float_of(which ? pair & 0xFFFF0000u : pair << 16); }

}  // namespace

uint32_t exchange(uint32_t value, int with) { return give({value})[with][0]; }

void multiply_from(float (&sums)[4], const float (&from)[4], const Words& a, const Words2& b) {
  const Given given = give({a.word[0], a.word[1], a.word[2], a.word[3], b.word[0], b.word[1]});
  const int i = lane->thread % kLanes / 4, j = lane->thread % 4;
  for (int s = 0; s < 4; ++s) {
    const int column = 2 * j + s % 2;
    double sum = 0;  // a GPU keeps more bits than f32 within an instruction
    for (int part = 0; part < 2; ++part)
      for (int k = 0; k < 4; ++k)
        for (int which = 0; which < 2; ++which)
          sum +=
              static_cast<double>(half_of(given[4 * i + k][static_cast<size_t>(part * 2 + s / 2)], which)) *
              static_cast<double>(half_of(given[4 * column + k][static_cast<size_t>(4 + part)], which));
    sums[s] = static_cast<float>(sum + static_cast<double>(from[s]));
  }
}

void copy16(void* shared, const void* from) {
  Fiber& mine = *runner->running;
  mine.copies.push_back({shared, from, mine.group});
}
void end_copies() { ++runner->running->group; }
void arrive_copies(int newest) {
  Fiber& mine = *runner->running;
  std::erase_if(mine.copies, [&](const Fiber::Copy& copy) {
    if (copy.group >= mine.group - newest) return false;
    std::memcpy(copy.to, copy.from, sizeof(Words));
    return true;
  });
}

}  // namespace kt::inline cuda::gpu

extern "C" void kt_test_begin() {
  using namespace kt::gpu;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &runner->home_bottom, &runner->home_size);
#endif
  runner->kernel->run(runner->arguments);
  runner->leave(State::kDone);
  std::abort();  // nobody resumes it
}
