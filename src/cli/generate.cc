// kt generate: one completion to standard output.
#include "engine/generate.h"
#include "base/cpu_choice.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "bench/measure.h"
#include "cli/experts_text.h"
#include "cli/model_flags.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "terminal/terminal_text.h"
#include "text/chat_template.h"

namespace kt::inline cli {
namespace {

struct GenerateFlags {
  ModelFlags model;
  std::string prompt, file, system;
  GenerateOptions options;
  bool chat = false, json = false, stats = false;
};

std::string prompt_text(const GenerateFlags& flags) {
  if (!flags.file.empty() && !flags.prompt.empty()) fail(tr("-p and -f: give one of them"));
  if (!flags.system.empty() && !flags.chat) fail(tr("--system: only with --chat"));
  if (flags.file.empty()) {
    if (flags.prompt.empty()) fail(tr("the prompt is empty; give one with -p TEXT or -f FILE"));
    return flags.prompt;
  }
  const MappedFile file(flags.file);
  if (file.size() == 0) fail("{}: the prompt is empty", flags.file);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.size()};
}

std::vector<int32_t> prompt_ids(const DescribedModel& model, const GenerateFlags& flags,
                                const std::string& prompt) {
  if (!flags.chat)
    return model.tokenizer().encode(prompt, {.special = SpecialText::kRecognise, .add_special = true});
  if (model.chat_template().empty()) fail("--chat: {} has no chat template", model.path());
  TemplateVariables messages = TemplateVariables::array();
  if (!flags.system.empty()) messages.push_back({{"role", "system"}, {"content", flags.system}});
  messages.push_back({{"role", "user"}, {"content", prompt}});
  TemplateVariables variables = model.template_tokens();
  variables["messages"] = messages;
  variables["tools"] = variables["documents"] = nullptr;  // templates ask whether they are none
  variables["add_generation_prompt"] = true;
  const std::string rendered = ChatTemplate(model.chat_template(), model.path()).render(variables);
  return model.tokenizer().encode(rendered, {.special = SpecialText::kRecognise});
}

double rate(size_t tokens, double seconds) { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }

// How fast a phase was, and how close to what this machine could do at best.
struct PhasePace {
  double tokens_per_s = 0;
  Limit limit;
  double fraction = 0;
};

PhasePace pace(size_t tokens, double seconds, const Work& work, const Rates& rates) {
  PhasePace out{.tokens_per_s = rate(tokens, seconds), .limit = limit_of(work, rates)};
  if (seconds > 0) out.fraction = out.limit.seconds / seconds;
  return out;
}

struct Stats {
  size_t decoded = 0;
  double load_seconds = 0, load_bytes_per_s = 0;
  Roofline roofline;
  PhasePace prefill, decode;
};

Stats stats_of(LoadedModel& model, const Generation& done, int threads) {
  Stats out{.decoded = static_cast<size_t>(done.decode_steps), .load_seconds = model.load_seconds()};
  out.load_bytes_per_s = model.stored_bytes() / out.load_seconds;
  out.roofline = measure_quickly(std::make_shared<Pool>(fitted({.threads = threads})), best_kernels());
  const Rates rates = rates_of(out.roofline);
  out.prefill = pace(done.prompt.size(), done.prefill_seconds, done.prefill_work, rates);
  out.decode = pace(out.decoded, done.decode_seconds, done.decode_work, rates);
  return out;
}

void print_stats(const Stats& stats, const LoadedModel& model, const Generation& done) {
  std::fprintf(
      stderr, "%zu prompt tokens at %s tokens/s, %zu tokens at %s tokens/s; %s\n", done.prompt.size(),
      three_digits(stats.prefill.tokens_per_s).c_str(), done.tokens.size(),
      three_digits(stats.decode.tokens_per_s).c_str(),
      model.experts_dialect().empty() ? "a dense model" : (model.experts_dialect() + " experts").c_str());
  if (done.experts) std::fprintf(stderr, "%s\n", experts_text(*done.experts).c_str());
  std::fprintf(stderr, "load: %s s, %s GB/s\n", three_digits(stats.load_seconds).c_str(),
               three_digits(stats.load_bytes_per_s * 1e-9).c_str());
  const auto line = [](const char* name, const PhasePace& p) {
    std::fprintf(stderr, "%s: %s of the limit (%s)\n", name, percent(p.fraction).c_str(), p.limit.which);
  };
  line("prefill", stats.prefill);
  if (stats.decoded > 0) line("decode", stats.decode);
  std::fprintf(stderr, "limits: reading %s GB/s, multiplying %s TOPS s8\n",
               three_digits(stats.roofline.read.median * 1e-9).c_str(),
               three_digits(stats.roofline.s8.median * 1e-12).c_str());
}

nlohmann::ordered_json json_of(const Stats& stats) {
  const auto phase = [](const PhasePace& p) {
    return nlohmann::ordered_json{
        {"tokens_per_s", p.tokens_per_s}, {"fraction_of_limit", p.fraction}, {"limit", p.limit.which}};
  };
  return {{"load", {{"seconds", stats.load_seconds}, {"gb_per_s", stats.load_bytes_per_s * 1e-9}}},
          {"prefill", phase(stats.prefill)},
          {"decode", phase(stats.decode)},
          {"read_gb_per_s", stats.roofline.read.median * 1e-9},
          {"s8_tops", stats.roofline.s8.median * 1e-12}};
}

void run_generate(const GenerateFlags& flags) {
  const std::string source = prompt_text(flags);  // before what takes minutes
  GenerateOptions options = flags.options;
  options.adapter = flags.model.one_adapter();
  flags.model.note_idle_flags();
  OpenedModel opened(flags.model.model, flags.model.options());
  std::vector<int32_t> prompt = prompt_ids(opened, flags, source);
  const int64_t context = static_cast<int64_t>(prompt.size()) + options.max_tokens;
  const MemoryRequest use{.context = static_cast<int>(std::min<int64_t>(context, opened.spec().context))};
  LoadedModel model = std::move(opened).load({.use = use});
  const bool to_terminal = ::isatty(STDOUT_FILENO) == 1;  // what a model says must not steer it
  const auto show = [to_terminal](std::string_view piece) {
    const std::string safe = to_terminal ? harmless(piece) : std::string(piece);
    std::fwrite(safe.data(), 1, safe.size(), stdout);
    std::fflush(stdout);
  };
  std::function<void(std::string_view)> emit;
  if (!flags.json) emit = show;
  const Generation done = generate(model, std::move(prompt), options, emit);
  std::optional<Stats> stats;
  if (flags.stats) stats = stats_of(model, done, flags.model.threads);
  if (flags.json) {
    const auto decoded = static_cast<size_t>(done.decode_steps);
    nlohmann::ordered_json out = {{"text", done.text},
                                  {"tokens", done.tokens},
                                  {"finish", done.finish},
                                  {"prompt_tokens", done.prompt.size()},
                                  {"prefill_tokens_per_s", rate(done.prompt.size(), done.prefill_seconds)},
                                  {"decode_tokens_per_s", rate(decoded, done.decode_seconds)}};
    if (stats) out["stats"] = json_of(*stats);
    std::printf("%s\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    return;
  }
  std::printf("\n");
  std::fflush(stdout);
  if (stats) print_stats(*stats, model, done);
}

}  // namespace

void add_generate(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("generate", "Complete a text with a model");
  const auto flags = std::make_shared<GenerateFlags>();
  flags->model.add_to(*verb, run);
  verb->add_option("-p,--prompt", flags->prompt, "The text to go on from");
  verb->add_option("-f,--file", flags->file, "A file with it");
  verb->add_flag("--chat", flags->chat, "The text is a message; put the model's chat template around it");
  verb->add_option("--system", flags->system, "System message, with --chat");
  verb->add_option("--max-tokens", flags->options.max_tokens, "Tokens to generate at most")
      ->check(positive())
      ->capture_default_str();
  flags->options.sampling.temperature = 0;
  SamplingOptions& sampling = flags->options.sampling;
  verb->add_option("--temperature", sampling.temperature, "0: always the most probable token")
      ->capture_default_str();
  verb->add_option("--top-k", sampling.top_k, "Choose among the k most probable")->capture_default_str();
  verb->add_option("--top-p", sampling.top_p, "Choose among the most probable that hold this probability")
      ->capture_default_str();
  verb->add_option("--min-p", sampling.min_p, "Not below this fraction of the most probable")
      ->capture_default_str();
  verb->add_option("--repetition-penalty", sampling.repetition_penalty,
                   "Above 1: repeats become less likely");
  verb->add_option("--presence-penalty", sampling.presence_penalty, "Subtracted once from what was said");
  verb->add_option("--frequency-penalty", sampling.frequency_penalty, "Subtracted for each time it was said");
  verb->add_option("--seed", sampling.seed, "Of the random choices")->capture_default_str();
  verb->add_option("--stop", flags->options.stops, "Stop before this text; may be repeated");
  verb->add_flag("--ignore-eos", flags->options.ignore_end, "Go on past the end of a turn");
  verb->add_flag("--stats", flags->stats,
                 "Say how fast it loaded and ran, and how close that is to this machine's limits");
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Examples:\n"
      "  kt generate ./demo/tiny-deepseekv3 -p 'Once upon a time' --max-tokens 100 --stats\n"
      "  kt generate ./Qwen3-30B-A3B --weights ./Qwen3-30B-A3B-int4 --chat -p 'Why is the sky blue?'");
  verb->callback([&run, flags] { run.action = [flags] { run_generate(*flags); }; });
}

}  // namespace kt::inline cli
