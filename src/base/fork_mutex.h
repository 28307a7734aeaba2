// A lock of the whole process that fork() waits for: the child finds it open and what it guards whole. For
// objects that are never destroyed; whoever holds one must not wait for the thread that forks.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

namespace kt::inline base {

// Forks of this process and its forebears, counted in the child: what was made under another number has lost
// its threads. A load, where getpid() is a system call.
uint32_t forks() noexcept;

// Every such lock, in the order in which those that are held together are taken, by the code that nests them and
// by fork().
enum class ForkLock : uint8_t {
  kCpuTeams,
  kStreams,
  kSharedExperts,
  kLayerModels,
  kCudaDriver,
  kTaskDoor,
  kPythonTeams,
  kStreamTasks,
  kMappedFiles,
  kLog,
  kPythonLog,
  kInterpreter,
  kOfATest,
};

class ForkMutex {
 public:
  static constexpr size_t kLocks = static_cast<size_t>(ForkLock::kOfATest) + 1;

  // Each is made once, before threads start: a fork does not wait for its making.
  explicit ForkMutex(ForkLock which);
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

  void lock();
  void unlock();

 private:
  static void before_fork();
  static void after_fork();
  static void in_child();

  std::mutex mutex_;
  // A thread that holds the lock may fork by itself (a driver that starts a program): it goes on holding it
  // on both sides.
  std::atomic<std::thread::id> owner_{};
};

}  // namespace kt::inline base
