// kt microbench load: how fast experts on disk become experts that run, against copying the same bytes in
// memory.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/pool.h"
#include "cli/verbs.h"
#include "models/families.h"
#include "models/load_experts.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

using Clock = std::chrono::steady_clock;

struct LoadFlags {
  std::string path;
  int threads = 0, layers = 0;
  bool json = false;
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Bytes a second that all workers together move with memcpy between buffers no cache holds; best of three.
double copy_rate(Pool& pool) {
  constexpr size_t kBytes = size_t{512} << 20;
  Buffer from(kBytes), to(kBytes);
  std::memset(from.data(), 1, kBytes);
  double best = 0;
  for (int round = 0; round < 4; ++round) {  // the first one touches the pages
    const auto start = Clock::now();
    pool.run([&](const Worker& worker) {
      const size_t threads = static_cast<size_t>(pool.threads()),
                   begin = kBytes / threads * static_cast<size_t>(worker.index);
      std::memcpy(to.data() + begin, from.data() + begin, kBytes / threads);
    });
    if (round) best = std::max(best, static_cast<double>(kBytes) / seconds_since(start));
  }
  return best;
}

struct Loaded {
  double stored_bytes = 0, packed_bytes = 0, seconds = 0;
  int layers = 0;
};

// Layers go one after the other into the same memory, so that any model fits.
Loaded load_layers(const ExpertSource& source, const std::shared_ptr<Pool>& pool, int most) {
  Loaded out;
  const auto workspace = std::make_shared<Workspace>();
  std::optional<Experts> experts;
  for (const int layer : source.layers()) {
    if (most > 0 && out.layers == most) break;
    if (!experts) {
      experts.emplace(pool, workspace, experts_shape(source), experts_options(source, layer));
      fill_experts(*pool, fill_of(source, layer, pool->threads()), *experts);  // touches the pages
    }
    const auto start = Clock::now();
    fill_experts(*pool, fill_of(source, layer, pool->threads()), *experts);
    out.seconds += seconds_since(start);
    out.stored_bytes += experts->stored_bytes_per_expert() * source.experts();
    out.packed_bytes += static_cast<double>(experts->packed_bytes());
    ++out.layers;
  }
  return out;
}

void run_load(const LoadFlags& flags) {
  const auto pool = std::make_shared<Pool>(fitted({.threads = flags.threads}));
  const auto source = open_experts(flags.path, gguf_families());
  const double copy = copy_rate(*pool);
  const Loaded loaded = load_layers(*source, pool, flags.layers);
  if (loaded.layers == 0) fail("{}: no layer with experts", flags.path);
  const double rate = loaded.stored_bytes / loaded.seconds;
  if (flags.json) {
    std::printf("%s\n", nlohmann::ordered_json{{"dialect", source->dialect()},
                                               {"layers", loaded.layers},
                                               {"stored_bytes", loaded.stored_bytes},
                                               {"packed_bytes", loaded.packed_bytes},
                                               {"seconds", loaded.seconds},
                                               {"gb_per_s", rate * 1e-9},
                                               {"copy_gb_per_s", copy * 1e-9},
                                               {"fraction_of_copy", rate / copy},
                                               {"threads", pool->threads()}}
                            .dump(2)
                            .c_str());
    return;
  }
  std::printf("%s, %s, %s: %s GB/s of stored weights into packed form; copying memory: %s GB/s (%s of it)\n",
              std::string(source->dialect()).c_str(), counted(loaded.layers, "layer").c_str(),
              counted(pool->threads(), "thread").c_str(), three_digits(rate * 1e-9).c_str(),
              three_digits(copy * 1e-9).c_str(), percent(rate / copy).c_str());
}

}  // namespace

void add_microbench_load(CLI::App& microbench, Invocation& run) {
  CLI::App* verb =
      microbench.add_subcommand("load", "Experts from disk into packed form, against copying memory");
  const auto flags = std::make_shared<LoadFlags>();
  verb->add_option("PATH", flags->path, "Converted weights, or a checkpoint")->required();
  verb->add_option("--threads", flags->threads, "Workers; default: one for each core")->check(positive());
  verb->add_option("--layers", flags->layers, "Layers to load; default: all")->check(positive());
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Files in the page cache are read at memory speed, others at the disk's: repeat it to see the "
      "first.\n\n"
      "Example:\n  kt microbench load ./Qwen3-30B-A3B-int4");
  verb->callback([&run, flags] { run.action = [flags] { run_load(*flags); }; });
}

}  // namespace kt::inline cli
