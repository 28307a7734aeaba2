// What KT needs of CUDA, from the driver library that is found at run time: every build has it and none needs
// a toolkit. On a machine without the library or without a GPU, cuda_driver() is null and says why; callers
// ask once and go on with plain memory, without #ifdef.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace kt::inline cuda {

// A stream of the caller's: CUstream of the driver, cudaStream_t of the runtime, `cuda_stream` of torch. Null
// is the legacy default stream.
using CudaStream = struct CudaStreamTag*;
using CudaEvent = struct CudaEventTag*;

// A piece of memory on its way.
struct CudaPiece {
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
};

// Where the GPU leaves messages for a thread of the host: words in page-locked memory, 0 where nothing is.
// They are filled one after the other, round and round; the reader sets them to 0.
struct CudaRing {
  uint64_t* words = nullptr;
  uint32_t count = 0;   // a power of 2, more than messages can be on their way
  uint32_t number = 0;  // of this ring in its context, below kMost: counts its messages
  static constexpr uint32_t kMost = 16;
};

// All functions throw Error(kInternal), where memory is short Error(kMemory), with CUDA's own name and text
// of the error and what was asked. They work in the context that is current in the calling thread, as the
// runtime and torch leave it. A thread without one gets the stream's; without a stream, that of the runtime
// on device 0. Any thread may call them. In a child forked after the first cuda_driver() they throw, unpin()
// does nothing.
class CudaDriver {
 public:
  virtual ~CudaDriver() = default;

  // Asynchronous, in the stream's order, between any two of device memory, page-locked and ordinary memory;
  // no bytes are no copy. With ordinary memory it may wait for the stream, and cannot be captured.
  virtual void copy(void* to, const void* from, size_t bytes, CudaStream stream) const = 0;
  // function(argument) on a thread of the driver, in the stream's order. It must not call CUDA nor throw. In
  // a captured graph it is called at each replay with the same argument.
  virtual void call(void (*function)(void*) noexcept, void* argument, CudaStream stream) const = 0;
  // A number that no other capture of this process has or will have, while the stream is being captured into
  // a graph; 0 when it is not.
  virtual uint64_t capture(CudaStream stream) const = 0;
  // function(argument) once, on any thread, some time after the graph that the stream is being captured into
  // is gone, and with it all that was instantiated from it and their launches: nothing replays it any more.
  // Then it must not call CUDA nor throw. An Error where the stream is not being captured; then never.
  virtual void at_end_of_graph(void (*function)(void*) noexcept, void* argument, CudaStream stream) const = 0;
  // Which context is current in the calling thread: null streams of two devices differ by it only.
  virtual const void* context() const = 0;
  // Makes the stream's own context current in the calling thread. The one that was, or null where it stays;
  // use_context() undoes it. StreamContext does both.
  virtual const void* use_context_of(CudaStream stream) const = 0;
  virtual void use_context(const void* context) const noexcept = 0;

  // The other way to work on the host in a stream's order, with less delay than copies and host functions:
  // the GPU itself writes to page-locked memory that a thread of the host watches, and the other way round.
  // `busy` is a word there, 0 at first. False where the GPU or the driver cannot do it, or where the
  // environment's KT_CUDA_POST is 0. For the current context; the first call loads what it needs,
  // and the driver may wait for all work of the device then.
  virtual bool posts() const = 0;
  // Waits for busy == 0, sets it to 1, copies the pieces to page-locked memory, leaves the message in the
  // ring. The large piece stands at multiples of 16 bytes and has such a size, small ones at multiples of 4.
  virtual void post(uint32_t* busy, const CudaPiece& large, const CudaPiece& first, const CudaPiece& second,
                    const CudaRing& ring, uint64_t message, CudaStream stream) const = 0;
  // Waits for busy == 0, then copies from page-locked memory, as a large piece.
  virtual void fetch(const uint32_t* busy, const CudaPiece& piece, CudaStream stream) const = 0;

  virtual void wait(CudaStream stream) const = 0;  // until all of it is done; an Error while capturing

  // Places in streams of the current context; StreamMark owns one.
  virtual CudaEvent make_event() const = 0;
  virtual void record(CudaEvent event, CudaStream stream) const = 0;
  virtual bool passed(CudaEvent event) const = 0;  // not for one that was recorded into a capture
  virtual void hold(CudaStream stream, CudaEvent event) const = 0;  // what follows in it is after the event
  virtual void end_event(CudaEvent event) const noexcept = 0;       // work that waits for it still does

  // Page-locked memory, readable by all devices. Free with `unpin`, not while a stream still uses it. Both
  // may be called while any thread captures any stream.
  virtual void* pin(size_t bytes) const = 0;
  virtual void unpin(void* memory) const noexcept = 0;
};

// Null where there is no driver library or no device. The first call looks, later ones cost nothing. The
// object lives to the end of the process, beyond static destructors.
const CudaDriver* cuda_driver();
// One line: "CUDA 13.0, 1 device", or why there is none ("libcuda.so.1 was not found").
std::string cuda_driver_status();
// There is none because the machine has no driver's library or no GPU: nothing is wrong with it.
bool cuda_absent();

// Memory that streams copy from and to: page-locked where there is a driver, ordinary where there is none.
// Zero-filled, aligned to 64, move-only.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(size_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  bool pinned_ = false;
};

// While it lives, the stream's context is current in the thread that made it: events are of one context, and
// only streams of that can set them. Costs two looks where it is current already. Needs cuda_driver().
class StreamContext {
 public:
  explicit StreamContext(CudaStream stream) : before_(cuda_driver()->use_context_of(stream)) {}
  ~StreamContext() {
    if (before_) cuda_driver()->use_context(before_);
  }
  StreamContext(const StreamContext&) = delete;
  StreamContext& operator=(const StreamContext&) = delete;

 private:
  const void* before_;
};

// A place in a stream, or in a stream of a capture: then later streams of the same capture can be held, and
// the graph has the edge. Move-only. Of the context that was current at the first set(). Needs cuda_driver().
class StreamMark {
 public:
  StreamMark() = default;
  ~StreamMark();
  StreamMark(StreamMark&& other) noexcept;
  StreamMark& operator=(StreamMark&& other) noexcept;

  void set(CudaStream stream);  // behind what the stream has now
  bool passed() const;          // by the stream; true before the first set()
  void hold(CudaStream stream) const;

 private:
  CudaEvent event_ = nullptr;
};

}  // namespace kt::inline cuda
