// kt generate: one completion to standard output.
#include "engine/generate.h"

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "cli/model_flags.h"
#include "cli/report.h"
#include "engine/chat_template.h"

namespace kt {
namespace {

struct GenerateFlags {
  ModelFlags model;
  std::string prompt, file, system;
  GenerateOptions options;
  bool chat = false, json = false, stats = false;
};

std::string prompt_text(const GenerateFlags& flags) {
  if (!flags.file.empty() && !flags.prompt.empty()) fail("-p and -f: give one of them");
  if (!flags.system.empty() && !flags.chat) fail("--system: only with --chat");
  if (flags.file.empty()) {
    if (flags.prompt.empty()) fail("the prompt is empty; give one with -p TEXT or -f FILE");
    return flags.prompt;
  }
  const MappedFile file(flags.file);
  if (file.size() == 0) fail("{}: the prompt is empty", flags.file);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.size()};
}

std::vector<int32_t> prompt_ids(const LoadedModel& model, const GenerateFlags& flags,
                                const std::string& words) {
  if (!flags.chat)
    return model.tokenizer().encode(words, {.special = SpecialText::kRecognise, .add_special = true});
  if (model.chat_template().empty()) fail("--chat: {} has no chat template", model.path());
  TemplateVariables messages = TemplateVariables::array();
  if (!flags.system.empty()) messages.push_back({{"role", "system"}, {"content", flags.system}});
  messages.push_back({{"role", "user"}, {"content", words}});
  TemplateVariables variables = model.template_tokens();
  variables["messages"] = messages;
  variables["tools"] = variables["documents"] = nullptr;  // templates ask whether they are none
  variables["add_generation_prompt"] = true;
  const std::string rendered = ChatTemplate(model.chat_template(), model.path()).render(variables);
  return model.tokenizer().encode(rendered, {.special = SpecialText::kRecognise});
}

double rate(size_t tokens, double seconds) { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }

void run_generate(const GenerateFlags& flags) {
  const std::string words = prompt_text(flags);  // before what takes minutes
  LoadedModel model(flags.model.model, flags.model.options());
  const auto show = [](std::string_view piece) {
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  };
  std::function<void(std::string_view)> emit;
  if (!flags.json) emit = show;
  const Generation done = generate(model, prompt_ids(model, flags, words), flags.options, emit);
  const size_t decoded = done.tokens.empty() ? 0 : done.tokens.size() - 1;
  if (flags.json) {
    std::printf("%s\n", nlohmann::ordered_json{{"text", done.text},
                                               {"tokens", done.tokens},
                                               {"finish", done.finish},
                                               {"prompt_tokens", done.prompt.size()},
                                               {"prefill_tokens_per_s",
                                                rate(done.prompt.size(), done.prefill_seconds)},
                                               {"decode_tokens_per_s", rate(decoded, done.decode_seconds)}}
                            .dump(2, ' ', false, nlohmann::json::error_handler_t::replace)
                            .c_str());
    return;
  }
  std::printf("\n");
  std::fflush(stdout);
  if (flags.stats)
    std::fprintf(stderr, "%zu prompt tokens at %s tokens/s, %zu tokens at %s tokens/s; %s experts\n",
                 done.prompt.size(), three_digits(rate(done.prompt.size(), done.prefill_seconds)).c_str(),
                 done.tokens.size(), three_digits(rate(decoded, done.decode_seconds)).c_str(),
                 model.experts_dialect().c_str());
}

}  // namespace

void ModelFlags::add_to(CLI::App& verb) {
  verb.add_option("MODEL", model, "The model's folder as it was published, or a .gguf file")->required();
  verb.add_option("--weights,--weights-path,--kt-weight-path", weights,
                  "Experts to use instead of the model's own: what kt quant wrote, or another checkpoint");
  verb.add_option("--format", format,
                  "Round the experts to this format as they are loaded: int8, int4, int4_g32, ...");
  verb.add_option("--acts", acts, "Precision of activations")
      ->check(CLI::IsMember({"default", "int8", "bf16", "f32"}))
      ->capture_default_str();
  verb.add_option("--kv", kv, "Precision of cached keys and values; f32 with --acts f32")
      ->check(CLI::IsMember({"bf16", "int8", "f32"}))
      ->capture_default_str();
  verb.add_option("--threads,--cpu-threads", threads, "Workers; default: one for each core")
      ->check(positive());
  verb.add_option("--chunked-prefill-size", step_tokens, "Tokens of prompts to run at once")
      ->check(positive())
      ->capture_default_str();
}

ModelOptions ModelFlags::options() const {
  return {.weights = weights,
          .format = format,
          .precision = precision_named(acts),
          .kv_type = acts == "f32" && kv == "bf16" ? KvType::kF32 : kv_type_named(kv),
          .threads = threads,
          .max_tokens = step_tokens};
}

void add_generate(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("generate", "Complete a text with a model");
  const auto flags = std::make_shared<GenerateFlags>();
  flags->model.add_to(*verb);
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
  verb->add_flag("--stats", flags->stats, "Say how fast it was");
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Examples:\n"
      "  kt generate ./demo/tiny-deepseekv3 -p 'Once upon a time' --max-tokens 100 --stats\n"
      "  kt generate ./Qwen3-30B-A3B --weights ./Qwen3-30B-A3B-int4 --chat -p 'Why is the sky blue?'");
  verb->callback([&run, flags] { run.action = [flags] { run_generate(*flags); }; });
}

}  // namespace kt
