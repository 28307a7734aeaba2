// Preloaded into kt by tests: halts it at a stated point of its work, however fast or busy the machine is. No part of
// the product knows of it. Points are the calls by which bytes and names reach the disk, counted over all threads from
// 1.
//
//   KT_TEST_HALT="kill call N"          dies (SIGKILL) before the N-th of those calls
//   KT_TEST_HALT="kill rename N NAME"   dies behind the N-th rename to a last name that begins with NAME
//   KT_TEST_HALT="stop ..."             the same, held by SIGSTOP until SIGCONT comes
//   KT_TEST_CALLS=FILE                  counts the calls in a file of 8 bytes
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

using Count = std::atomic<uint64_t>;

struct Halt {
  int signal = 0;  // none
  bool at_rename = false;
  unsigned long long number = 0;
  char name[128] = "";
  Count* calls = nullptr;
  Count renames{0};

  Halt() {
    static Count own{0};
    calls = &own;
    if (const char* const value = std::getenv("KT_TEST_HALT")) {
      char how[8] = "", where[8] = "";
      if (sscanf(value, "%7s %7s %llu %127s", how, where, &number, name) < 3) std::abort();
      signal = std::strcmp(how, "stop") == 0 ? SIGSTOP : SIGKILL;
      at_rename = std::strcmp(where, "rename") == 0;
    }
    if (const char* const file = std::getenv("KT_TEST_CALLS")) {
      const int fd = open(file, O_RDWR | O_CLOEXEC);
      void* const shared = mmap(nullptr, sizeof(Count), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (fd < 0 || shared == MAP_FAILED) std::abort();
      close(fd);
      calls = std::launder(static_cast<Count*>(shared));
    }
  }
  void before_call() {
    if (++*calls == number && signal && !at_rename) kill(getpid(), signal);
  }
  void after_rename(const char* to) {
    if (!signal || !at_rename) return;
    const char* const slash = std::strrchr(to, '/');
    if (std::strncmp(slash ? slash + 1 : to, name, std::strlen(name)) != 0) return;
    if (++renames == number) kill(getpid(), signal);
  }
};

Halt& halt() {
  static Halt it;
  return it;
}

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

ssize_t write(int fd, const void* bytes, size_t count) {
  static auto* const real = next<ssize_t(int, const void*, size_t)>("write");
  if (fd > 2) halt().before_call();  // what is said to a terminal is no work
  return real(fd, bytes, count);
}

ssize_t pwrite(int fd, const void* bytes, size_t count, off_t at) {
  static auto* const real = next<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  halt().before_call();
  return real(fd, bytes, count, at);
}

ssize_t pwrite64(int fd, const void* bytes, size_t count, off64_t at) {
  static auto* const real = next<ssize_t(int, const void*, size_t, off64_t)>("pwrite64");
  halt().before_call();
  return real(fd, bytes, count, at);
}

int fsync(int fd) {
  static auto* const real = next<int(int)>("fsync");
  halt().before_call();
  return real(fd);
}

int syncfs(int fd) noexcept {
  static auto* const real = next<int(int)>("syncfs");
  halt().before_call();
  return real(fd);
}

int rename(const char* from, const char* to) noexcept {
  static auto* const real = next<int(const char*, const char*)>("rename");
  halt().before_call();
  const int result = real(from, to);
  if (result == 0) halt().after_rename(to);
  return result;
}

}  // extern "C"
