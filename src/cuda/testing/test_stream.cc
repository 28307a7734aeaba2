#include "cuda/testing/test_stream.h"

#include <algorithm>

#include "cuda/testing/test_driver.h"

namespace kt::inline cuda::test_driver {

thread_local bool in_host_function = false;
thread_local int capture_mode = kModeGlobal;

namespace {

// The life of a stream's thread.
void run(std::shared_ptr<Stream> stream) {
  World& world = World::get();
  std::unique_lock lock(world.mutex);
  const auto ready = [&] {
    if (stream->items.empty()) return stream->closing;
    return std::ranges::all_of(stream->items.front().after, &Point::passed);
  };
  while (true) {
    world.changed.wait(lock, ready);
    if (stream->items.empty()) return;
    Item item = std::move(stream->items.front());
    stream->items.pop_front();
    lock.unlock();
    for (const Work& work : item.works) work();
    item = {};
    lock.lock();
    ++stream->done;
    world.changed.notify_all();
  }
}

struct ThreadStream {
  std::shared_ptr<Stream> it;
  uintptr_t handle = 0;

  ~ThreadStream() {
    if (!it) return;
    const std::lock_guard lock(World::get().mutex);
    it->closing = true;
    World::get().streams.erase(handle);
    World::get().changed.notify_all();
  }
};

// Never destroyed: its thread ends with the process.
struct HostFunctions {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  uint64_t added = 0, done = 0;

  void serve() {
    in_host_function = true;
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return !queue.empty(); });
      const Work work = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      work();
      lock.lock();
      ++done;
      changed.notify_all();
    }
  }
  static HostFunctions& get() {
    static HostFunctions& it = *[] {
      HostFunctions* const made = std::make_unique<HostFunctions>().release();
      std::thread([made] { made->serve(); }).detach();
      return made;
    }();
    return it;
  }
};

bool null_stream_waits(const World& world) {
  return std::ranges::any_of(world.captures, [](const auto& capture) { return capture->origin->blocking; });
}

}  // namespace

void run_host_function(void (*function)(void*), void* argument) {
  HostFunctions& all = HostFunctions::get();
  std::unique_lock lock(all.mutex);
  all.queue.emplace_back([=] { function(argument); });
  const uint64_t mine = ++all.added;
  all.changed.notify_all();
  all.changed.wait(lock, [&] { return all.done >= mine; });
}

World& World::get() {
  static World& world = *std::make_unique<World>().release();
  return world;
}

bool Point::passed() const { return !stream || stream->done >= ticket; }

std::shared_ptr<Stream> start_stream(World&, bool blocking) {
  auto stream = std::make_shared<Stream>();
  stream->context = current_context;
  stream->blocking = blocking;
  std::thread(run, stream).detach();
  return stream;
}

std::shared_ptr<Stream> thread_stream(World& world) {
  thread_local ThreadStream own;
  if (!own.it) {
    own.it = start_stream(world, true);
    own.handle = world.last_handle += 16;
    world.streams[own.handle] = own.it;
  }
  return own.it;
}

CudaResult find_stream(World& world, CudaStream handle, std::shared_ptr<Stream>& stream) {
  if (reinterpret_cast<uintptr_t>(handle) <= 1) {
    if (null_stream_waits(world)) {
      for (const auto& capture : world.captures) capture->invalid |= capture->origin->blocking;
      return kCaptureImplicit;
    }
    if (!world.null_stream) world.null_stream = start_stream(world, false);
    stream = world.null_stream;
    return 0;
  }
  if (reinterpret_cast<uintptr_t>(handle) == 2) {
    stream = thread_stream(world);
  } else {
    const auto at = world.streams.find(reinterpret_cast<uintptr_t>(handle));
    if (at == world.streams.end()) return kInvalidHandle;
    stream = at->second;
  }
  return stream->capture && stream->capture->invalid ? kCudaCaptureInvalidated : 0;
}

Point append(World& world, const std::shared_ptr<Stream>& stream, std::vector<Work> works,
             std::vector<Point> after) {
  if (Capture* const capture = stream->capture.get()) {
    std::ranges::move(works, std::back_inserter(capture->nodes));
    if (stream.get() != capture->origin) capture->unjoined.insert(stream.get());
    return {};
  }
  std::ranges::move(stream->next_after, std::back_inserter(after));
  stream->next_after.clear();
  if (stream == world.null_stream) {
    for (const auto& [handle, other] : world.streams)
      if (other->blocking) after.push_back({other, other->enqueued});
  } else if (stream->blocking && world.null_stream) {
    after.push_back({world.null_stream, world.null_stream->enqueued});
  }
  // One that stream order answers already; it would make a stream own itself.
  std::erase_if(after, [&](const Point& point) { return point.stream == stream || point.passed(); });
  stream->items.push_back({std::move(works), std::move(after)});
  ++stream->enqueued;
  world.changed.notify_all();
  return {stream, stream->enqueued};
}

CudaResult forbid(Stream& stream) {
  if (!stream.capture) return 0;
  stream.capture->invalid = true;
  return kCaptureUnsupported;
}

CudaResult unsafe_call(World& world) {
  if (capture_mode == kModeRelaxed) return 0;
  CudaResult result = 0;
  for (const auto& capture : world.captures) {
    const bool own = capture->thread == std::this_thread::get_id() && capture->mode != kModeRelaxed;
    if (!own && !(capture_mode == kModeGlobal && capture->mode == kModeGlobal)) continue;
    capture->invalid = true;
    result = kCaptureUnsupported;
  }
  return result;
}

CudaResult begin_capture(World& world, const std::shared_ptr<Stream>& stream, int mode) {
  if (stream == world.null_stream) return kCaptureUnsupported;
  if (stream->capture || mode < kModeGlobal || mode > kModeRelaxed) return kInvalidValue;
  stream->capture = std::make_shared<Capture>(Capture{.id = world.last_capture++,
                                                      .mode = mode,
                                                      .thread = std::this_thread::get_id(),
                                                      .origin = stream.get()});
  world.captures.insert(stream->capture);
  return 0;
}

CudaResult end_capture(World& world, const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>& graph) {
  const std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return kInvalidValue;
  if (capture->origin != stream.get()) return kCaptureUnmatched;
  if (capture->mode != kModeRelaxed && capture->thread != std::this_thread::get_id())
    return kCaptureWrongThread;
  for (const auto& [handle, other] : world.streams)
    if (other->capture == capture) other->capture = nullptr;
  world.captures.erase(capture);
  if (capture->invalid) return kCudaCaptureInvalidated;
  if (!capture->unjoined.empty()) return kCaptureUnjoined;
  graph = std::make_shared<Graph>(Graph{std::move(capture->nodes)});
  return 0;
}

CudaResult record_event(World& world, const std::shared_ptr<Stream>& stream, Event& event) {
  const CudaContext context = stream == world.null_stream ? current_context : stream->context;
  if (event.context != context) return kInvalidHandle;
  event = {.context = event.context, .capture = stream->capture, .stream = stream.get()};
  if (!stream->capture) event.point = append(world, stream, {});
  return 0;
}

CudaResult wait_event(const std::shared_ptr<Stream>& stream, const Event& event) {
  if (!event.capture) {
    // Work outside of the capture would be waited for by the graph's makers, not by its replays.
    if (stream->capture)
      return event.point.stream ? (stream->capture->invalid = true, kCaptureUnsupported) : 0;
    if (event.point.stream != stream) stream->next_after.push_back(event.point);
    return 0;
  }
  if (stream->capture && stream->capture != event.capture) return forbid(*stream);
  stream->capture = event.capture;
  event.capture->unjoined.erase(event.stream);
  if (stream.get() != event.capture->origin) event.capture->unjoined.insert(stream.get());
  return 0;
}

}  // namespace kt::inline cuda::test_driver
