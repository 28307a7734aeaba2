#include "hybrid/shared_experts.h"

#include <filesystem>
#include <map>
#include <mutex>
#include <system_error>

#include "base/fork_mutex.h"
#include "models/families.h"

namespace kt::inline hybrid {
namespace {

// Who has which path open. Entries of paths that nobody uses any more are dropped when another one is opened.
struct OpenPaths {
  ForkMutex mutex{ForkLock::kSharedExperts};
  std::map<std::string, std::weak_ptr<const ExpertSource>> sources;
};

// Never destroyed: layers may be loaded while the process ends.
OpenPaths& open_paths() {
  static OpenPaths& paths = *std::make_unique<OpenPaths>().release();
  return paths;
}

[[maybe_unused]] const OpenPaths& made_early = open_paths();  // before threads that fork

// One name for one place, however it was spelt.
std::string key_of(const std::string& path) {
  std::error_code error;
  const std::filesystem::path canonical = std::filesystem::weakly_canonical(path, error);
  return error ? path : canonical.string();
}

}  // namespace

std::shared_ptr<const ExpertSource> shared_experts(const std::string& path) {
  const std::string key = key_of(path);
  OpenPaths& open = open_paths();
  std::lock_guard lock(open.mutex);
  if (const auto found = open.sources.find(key); found != open.sources.end())
    if (auto source = found->second.lock()) return source;
  auto source = open_experts(path, gguf_families());
  std::erase_if(open.sources, [](const auto& entry) { return entry.second.expired(); });
  open.sources[key] = source;
  return source;
}

void forget_experts(const std::string& path) {
  OpenPaths& open = open_paths();
  std::lock_guard lock(open.mutex);
  open.sources.erase(key_of(path));
}

}  // namespace kt::inline hybrid
