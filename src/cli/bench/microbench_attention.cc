// kt microbench attention: flags, table and JSON; the measuring is in attention_bench.cc.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/text.h"
#include "bench/attention_bench.h"
#include "bench/limit_report.h"
#include "cli/bench/measure_flags.h"
#include "cli/verbs.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

constexpr int kLatentRank = 512, kLatentRope = 64;  // DeepSeek V2 and V3
constexpr int kMostGroup = 256;                     // query heads of one key head that AttentionWork takes

struct AttentionFlags {
  int heads = 0;  // 0: 32, or 16 of latent attention
  int kv_heads = 4, head_dim = 128, batch = 1, window = 0, layers = 0, threads = 0;
  bool mla = false;
  BenchIndexer indexer;
  MeasureFlags measure;
  std::vector<int> contexts = {1024, 8192, 16384}, tokens = {1};
  std::string kv = "bf16", isa;
};

struct Row {
  int context = 0, tokens = 0, layers = 0;
  size_t cache_bytes = 0;
  LimitFigures figures;
};

double us_per_1k(const Row& row) { return row.figures.seconds * 1e6 / (row.context / 1024.0); }

nlohmann::ordered_json json_of(const Row& row, const AttentionSetup& setup, const AttentionFlags& flags) {
  const LimitFigures& f = row.figures;
  nlohmann::ordered_json out;
  out["context"] = row.context;
  out["tokens"] = row.tokens;
  out["batch"] = setup.batch;
  out["window"] = setup.window;
  if (setup.indexer.budget > 0)
    out["indexer"] = {
        {"top_k", setup.indexer.budget}, {"heads", setup.indexer.heads}, {"dim", setup.indexer.dim}};
  out["isa"] = setup.kernels->name;
  out["heads"] = setup.heads;
  out["kv_heads"] = setup.shape.heads;
  out["d"] = setup.shape.d;
  out["dv"] = setup.shape.dv;
  out["mla"] = setup.shape.shared;
  out["kv"] = flags.kv;
  out["layers"] = row.layers;
  out["threads"] = setup.pool->threads();
  out["us"] = f.seconds * 1e6;
  out["us_best"] = f.best_seconds * 1e6;
  out["us_per_1k_context"] = us_per_1k(row);
  out["gb_per_s"] = f.bytes / f.seconds / 1e9;
  out["tflops"] = f.operations / f.seconds / 1e12;
  put_limit(out, f);
  out["kv_bytes"] = f.bytes;
  out["operations"] = f.operations;
  out["cache_bytes"] = row.cache_bytes;
  put_windows(out, f);
  return out;
}

void print_heads() {
  std::printf("%7s %6s %6s %10s %9s %7s %8s  %s %9s\n", "context", "tokens", "layers", "us", "us per 1k",
              "GB/s", "TFLOPS", limit_heads().c_str(), "dropped");
}

void print_row(const Row& row) {
  const LimitFigures& f = row.figures;
  std::printf("%7d %6d %6d %10.0f %9s %7.1f %8s  %s %9s%s\n", row.context, row.tokens, row.layers,
              f.seconds * 1e6, three_digits(us_per_1k(row)).c_str(), f.bytes / f.seconds / 1e9,
              three_digits(f.operations / f.seconds / 1e12).c_str(), limit_cells(f).c_str(),
              dropped_cell(f).c_str(), remark(f).c_str());
  std::fflush(stdout);
}

AttentionSetup setup_of(const AttentionFlags& flags) {
  AttentionSetup setup;
  setup.kernels = flags.isa.empty() ? &best_kernels() : &kernels_named(flags.isa);
  setup.heads = flags.heads ? flags.heads : flags.mla ? 16 : 32;
  setup.layers = flags.layers;
  setup.shape = {.heads = flags.mla ? 1 : flags.kv_heads,
                 .d = flags.mla ? kLatentRank + kLatentRope : flags.head_dim,
                 .dv = flags.mla ? kLatentRank : flags.head_dim,
                 .shared = flags.mla,
                 .type = kv_type_named(flags.kv)};
  setup.batch = flags.batch;
  setup.window = flags.window;
  setup.indexer = flags.indexer;
  if (setup.heads % setup.shape.heads != 0)
    fail("--heads {} is not a multiple of --kv-heads {}", setup.heads, setup.shape.heads);
  if (setup.heads / setup.shape.heads > kMostGroup)
    fail("--heads {} over {}: at most {} may share a key head", setup.heads,
         counted(setup.shape.heads, "key head"), kMostGroup);
  const int shortest = *std::min_element(flags.contexts.begin(), flags.contexts.end());
  for (const int tokens : flags.tokens)
    if (tokens > shortest)
      fail("--tokens {} is more than --context {}: new tokens are the last of the context", tokens, shortest);
  setup.pool = std::make_shared<Pool>(fitted({.threads = flags.threads}));
  return setup;
}

void print_setup(const AttentionSetup& setup, const AttentionFlags& flags) {
  const KvShape& shape = setup.shape;
  const BenchIndexer& indexer = setup.indexer;
  std::printf("%d heads over %s of %d %s; %s, %s; %s cache, %s%s%s\n\n", setup.heads,
              counted(shape.heads, shape.shared ? "shared head" : "key head").c_str(), shape.d,
              shape.shared ? text("numbers ({} of them values)", shape.dv).c_str() : "numbers",
              setup.kernels->name, counted(setup.pool->threads(), "thread").c_str(), flags.kv.c_str(),
              counted(setup.batch, "sequence").c_str(),
              setup.window ? text(", window {}", setup.window).c_str() : "",
              indexer.budget ? text(", {} keys chosen by {} of {} numbers", indexer.budget,
                                    counted(indexer.heads, "index head"), indexer.dim)
                                   .c_str()
                             : "");
}

void run_attention(const AttentionFlags& flags) {
  const AttentionSetup setup = setup_of(flags);
  for (const int tokens : flags.tokens) check_attention_call(setup, tokens);
  if (!flags.measure.json) {
    print_setup(setup, flags);
    print_heads();
  }
  Reader reader(setup.pool, *setup.kernels, read_buffer_bytes());
  auto rows = nlohmann::ordered_json::array();
  bool above = false;
  for (const int context : flags.contexts) {
    std::optional<StatusLine> status(std::in_place);
    status->show(text("filling a cache of {} tokens", context));
    const AttentionBench bench(setup, context);
    for (const int tokens : flags.tokens) {
      if (!status) status.emplace();
      status->show(text("context {}, {} tokens", context, tokens));
      const Row row{context, tokens, bench.layers(), bench.bytes(),
                    bench.measure(reader, tokens, flags.measure.time)};
      status.reset();
      above |= above_limit(row.figures);
      rows.push_back(json_of(row, setup, flags));
      if (!flags.measure.json) print_row(row);
    }
  }
  flags.measure.report(rows);
  if (above && !flags.measure.json) std::printf("\n%s\n", std::string(limit_note()).c_str());
}

void add_flags(CLI::App& verb, AttentionFlags& flags) {
  verb.add_option("--heads", flags.heads,
                  flags.mla ? "Query heads; default: 16" : "Query heads; default: 32, or 16 with --mla")
      ->check(within(1, kMostHeads));
  if (!flags.mla) {
    const auto kv_heads = verb.add_option("--kv-heads", flags.kv_heads, "Heads of keys and values")
                              ->check(within(1, kMostHeads))
                              ->capture_default_str();
    const auto head_dim = verb.add_option("--head-dim", flags.head_dim, "Width of a head")
                              ->check(within(1, kMostHeadWidth))
                              ->capture_default_str();
    verb.add_flag("--mla", flags.mla,
                  text("Latent attention: one shared head of {} + {} numbers; the same as kt microbench mla",
                       kLatentRank, kLatentRope))
        ->excludes(kv_heads)
        ->excludes(head_dim);
  }
  verb.add_option("-s,--context,--seq-len", flags.contexts, "Tokens of a sequence; a list measures each")
      ->delimiter(',')
      ->check(within(1, kMostTokens))
      ->capture_default_str();
  verb.add_option("--tokens", flags.tokens, "New tokens at the end of the context; a list measures each")
      ->delimiter(',')
      ->check(within(1, kMostTokens))
      ->capture_default_str();
  verb.add_option("-b,--batch,--batch-size", flags.batch, "Sequences of a call")
      ->check(within(1, kMostSequences))
      ->capture_default_str();
  const auto window = verb.add_option("--window", flags.window, "Positions a token sees; default: all")
                          ->check(within(1, kMostTokens));
  const auto top_k =
      verb.add_option("--index-top-k", flags.indexer.budget,
                      "Keys that an indexer chooses for each token; its scores of all keys are part of "
                      "the call; default: none, all are seen")
          ->check(within(1, kMostTokens))
          ->excludes(window);
  verb.add_option("--index-heads", flags.indexer.heads, "Heads of the indexer")
      ->check(within(1, kMostGroup))
      ->capture_default_str()
      ->needs(top_k);
  verb.add_option("--index-dim", flags.indexer.dim, "Numbers of an indexer's head")
      ->check(within(1, kMostHeadWidth))
      ->capture_default_str()
      ->needs(top_k);
  verb.add_option("--kv", flags.kv, "Type of the cache")
      ->check(CLI::IsMember({"bf16", "int8", "f32"}))
      ->capture_default_str();
  verb.add_option("--layers", flags.layers, "Layers to rotate over; default: enough that no cache holds them")
      ->check(within(1, kMostLayers));
  verb.add_option("--threads", flags.threads, "Workers; default: one for each core")->check(positive());
  verb.add_option("--isa", flags.isa, "Instruction set (see kt version); default: the best here");
  flags.measure.add_to(verb);
}

}  // namespace

void add_microbench_attention(CLI::App& microbench, Invocation& run) {
  CLI::App* verb =
      microbench.add_subcommand("attention", "Attention of one layer over a filled cache, against the limit");
  const auto flags = std::make_shared<AttentionFlags>();
  add_flags(*verb, *flags);
  verb->footer(
      "The limit of a call is the larger of two times: keys and values of every sequence, read once / read\n"
      "bandwidth, and 2 x query rows x keys seen x (d + dv) operations / multiply peak (bf16; f32 for\n"
      "--kv f32 or where the instruction set has no bf16 product). `us per 1k` is the time for each 1024\n"
      "tokens of context: it stays flat where attention grows no faster than the context does.\n\n"
      "Examples:\n"
      "  kt microbench attention --context 1024,8192,16384\n"
      "  kt microbench attention --context 8192 --tokens 1,512 --batch 4\n"
      "  kt microbench attention --mla --heads 128 --context 4096 --kv bf16 --json");
  verb->callback([&run, flags] { run.action = [flags] { run_attention(*flags); }; });
}

void add_microbench_mla(CLI::App& microbench, Invocation& run) {
  CLI::App* verb = microbench.add_subcommand(
      "mla",
      text("Latent attention of one layer: one shared head of {} + {} numbers", kLatentRank, kLatentRope));
  const auto flags = std::make_shared<AttentionFlags>();
  flags->mla = true;
  add_flags(*verb, *flags);
  verb->footer(
      "As kt microbench attention --mla, whose page says what the limit is.\n\n"
      "Examples:\n"
      "  kt microbench mla -b 1 -s 8192\n"
      "  kt microbench mla --heads 64 -s 65536 --index-top-k 2048\n"
      "  kt microbench mla --heads 128 -s 4096 -n 50 -w 5 -o mla.json");
  verb->callback([&run, flags] { run.action = [flags] { run_attention(*flags); }; });
}

}  // namespace kt::inline cli
