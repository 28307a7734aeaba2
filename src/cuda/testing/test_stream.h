// Streams, captures, graphs and events of the test driver. A stream is a thread with a queue. One lock guards
// all of it: simple, and slow enough not to be mistaken for a GPU. Handles are numbers that are never used
// again, so that a stale one is found out.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "cuda/driver_library.h"

namespace kt::inline cuda::test_driver {

constexpr CudaResult kInvalidValue = 1, kInvalidContext = 201, kInvalidHandle = 400, kNotReady = 600,
                     kIllegalAddress = 700, kAlreadyLocked = 712, kNotLocked = 713, kNotPermitted = 800,
                     kCaptureUnsupported = 900, kCaptureUnmatched = 903, kCaptureUnjoined = 904,
                     kCaptureImplicit = 906, kCaptureWrongThread = 908;
constexpr int kModeGlobal = 0, kModeRelaxed = 2;

struct Stream;
struct Event;

using Work = std::function<void()>;  // one node of a graph, or one operation of a stream

// All up to `ticket` of the stream.
struct Point {
  std::shared_ptr<Stream> stream = {};
  uint64_t ticket = 0;
  bool passed() const;
};

struct Capture {
  uint64_t id = 0;
  int mode = kModeGlobal;
  std::thread::id thread = {};
  Stream* origin = nullptr;
  bool invalid = false;
  std::vector<Work> nodes = {};     // in the order of recording, which no dependency contradicts
  std::set<Stream*> unjoined = {};  // streams that joined by an event and whose work nobody of it waits for
};

struct Item {
  std::vector<Work> works;
  std::vector<Point> after;
};

struct Stream {
  CudaContext context = nullptr;
  bool blocking = true;  // against the null stream
  bool closing = false;
  std::deque<Item> items = {};
  uint64_t enqueued = 0, done = 0;
  std::vector<Point> next_after = {};  // what the next item waits for besides
  std::shared_ptr<Capture> capture = {};
};

struct Event {
  CudaContext context = nullptr;
  Point point = {};
  std::shared_ptr<Capture> capture = {};  // recorded in one
  Stream* stream = nullptr;               // of the capture
};

// What a graph holds by a node that does nothing; calls `end` when the last copy of the node is gone.
struct UserObject {
  void (*end)(void*);
  void* argument;
  UserObject(void (*end)(void*), void* argument) : end(end), argument(argument) {}
  UserObject(const UserObject&) = delete;
  UserObject& operator=(const UserObject&) = delete;
  ~UserObject() { end(argument); }
};

struct Graph {
  std::vector<Work> nodes;
};

struct Executable {
  std::vector<Work> nodes;
  Point last = {};  // launches of one executable follow each other
};

// All that the lock guards.
struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<Stream> null_stream;
  std::map<uintptr_t, std::shared_ptr<Stream>> streams;
  std::map<uintptr_t, std::shared_ptr<Event>> events;
  std::map<uintptr_t, std::shared_ptr<Graph>> graphs;
  std::map<uintptr_t, std::shared_ptr<Executable>> executables;
  std::map<uintptr_t, std::shared_ptr<UserObject>> user_objects;  // that no graph has yet
  std::set<std::shared_ptr<Capture>> captures;
  std::map<uintptr_t, std::shared_ptr<char>> contexts;  // besides the primary one
  uintptr_t last_handle = 0x10000;
  uint64_t last_capture = 0;
  uint64_t most_queued = UINT64_MAX;  // operations of a stream; a call that adds one more waits for room
  int waiting = 0;                    // calls that do
  CudaResult broken = 0;              // an operation failed: what every later call returns
  int broken_device = -1;             // that of one device alone; -1: of all
  CudaResult error_of(int device) const { return broken_device < 0 || broken_device == device ? broken : 0; }

  static World& get();
};

// Runs it on the one thread that all host functions run on, as the driver does, and returns when it is done.
void run_host_function(void (*function)(void*), void* argument);
extern thread_local bool in_host_function;
extern thread_local int capture_mode;

std::shared_ptr<Stream> start_stream(World& world, bool blocking);  // of the current context

// Handle 2: the default stream of the calling thread, which lives as long as the thread.
std::shared_ptr<Stream> thread_stream(World& world);

// The stream of a handle for an operation; an error where there is none, where its capture is invalid, or
// where the null stream would have to wait for a capture (which makes that invalid).
CudaResult find_stream(World& world, CudaStream handle, std::shared_ptr<Stream>& stream);

// Into the stream's capture, or to its end. The point is null for a captured one.
Point append(World& world, const std::shared_ptr<Stream>& stream, std::vector<Work> works,
             std::vector<Point> after = {});

CudaResult forbid(Stream& stream);     // a call that no captured stream allows; makes the capture invalid
CudaResult unsafe_call(World& world);  // a call that captures forbid unless the thread's mode is relaxed
CudaResult begin_capture(World& world, const std::shared_ptr<Stream>& stream, int mode);
CudaResult end_capture(World& world, const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>& graph);
CudaResult record_event(World& world, const std::shared_ptr<Stream>& stream, Event& event);
CudaResult wait_event(const std::shared_ptr<Stream>& stream, const Event& event);

}  // namespace kt::inline cuda::test_driver
