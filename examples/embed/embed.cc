// Loads a model and prints how it goes on from a text, as the tokens come: embed MODEL PROMPT [MAX_TOKENS]
#include <kt/base/error.h>
#include <kt/engine/generate.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

namespace {

void stream_answer(const char* path, const char* prompt, int max_tokens) {
  // Only headers are read so far, so the memory that it would take is known before any is taken.
  kt::OpenedModel opened(path);
  const kt::MemoryRequest use{.sequences = 1, .context = opened.spec().context};
  std::fprintf(stderr, "%d layers, %.1f MB on %d threads\n", static_cast<int>(opened.spec().layers.size()),
               static_cast<double>(opened.memory_plan(use).peak()) * 1e-6, opened.threads());

  const std::vector<int32_t> tokens = opened.tokenizer().encode(prompt, {.add_special = true});
  kt::LoadedModel model = std::move(opened).load({.use = use});
  kt::GenerateOptions options;
  options.max_tokens = max_tokens;
  options.sampling.temperature = 0;  // always the most probable token
  const kt::Generation done = kt::generate(model, tokens, options, [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  });
  std::fprintf(stderr, "\n%zu tokens, ended by %s\n", done.tokens.size(), done.finish.c_str());
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return std::fprintf(stderr, "usage: embed MODEL PROMPT [MAX_TOKENS]\n"), 2;
  try {
    stream_answer(words[1], words[2], count > 3 ? std::atoi(words[3]) : 100);
    return 0;
  } catch (const kt::Error& error) {  // a sentence that names what was expected and what came
    std::fprintf(stderr, "error: %s\n", error.what());
    return static_cast<int>(error.kind());
  }
}
